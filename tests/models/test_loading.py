import shutil
from pathlib import Path

import pytest
import torch

from rayrl.errors import ModelError
from rayrl.models.loading import create_empty_causal_lm, load_causal_lm


def test_model_is_loaded_in_the_asked_dtype_and_evaluation_mode(tiny_folder: Path) -> None:
    model = load_causal_lm(tiny_folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training
    assert model.config._attn_implementation == "sdpa"


def test_model_is_loaded_in_training_mode_when_asked(tiny_folder: Path) -> None:
    assert load_causal_lm(tiny_folder, train=True).training


def test_folder_without_weights_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match="no weights"):
        load_causal_lm(folder)


def test_damaged_weights_are_a_model_error(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ModelError, match="cannot load the model"):
        load_causal_lm(folder)


def test_empty_model_has_the_same_parameters_without_storage(tiny_folder: Path) -> None:
    empty = create_empty_causal_lm(tiny_folder)
    full = load_causal_lm(tiny_folder)
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in full.named_parameters()}
    assert all(parameter.is_meta for parameter in empty.parameters())
