"""Experts under the names of model files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rayrl.models.expert_names import as_in_files, expert_sources, names_in_files, stored_name

_QWEN = [f"model.layers.0.mlp.experts.{e}.{p}.weight" for e in range(2) for p in ("gate_proj", "up_proj", "down_proj")]
_MIXTRAL = [f"model.layers.0.block_sparse_moe.experts.{e}.{p}.weight" for e in range(2) for p in ("w1", "w2", "w3")]


@pytest.mark.parametrize("stored", [_QWEN, _MIXTRAL], ids=["qwen", "mixtral"])
def test_fused_experts_are_cut_into_the_tensors_of_the_files(stored: list[str]) -> None:
    fused = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    down = torch.arange(2 * 4 * 3.0).view(2, 4, 3)

    pieces = dict(as_in_files("model.layers.0.mlp.experts.gate_up_proj", fused, stored))
    pieces |= dict(as_in_files("model.layers.0.mlp.experts.down_proj", down, stored))

    assert sorted(pieces) == sorted(stored)
    sources = expert_sources("model.layers.0.mlp.experts.gate_up_proj", stored)
    assert sources is not None
    for number, parts in enumerate(sources):
        assert torch.cat([pieces[part] for part in parts]).equal(fused[number])


def test_a_renamed_block_and_other_weights_keep_their_tensor() -> None:
    router = torch.ones(2, 3)
    stored = {"model.layers.0.block_sparse_moe.gate.weight", "model.norm.weight"}

    assert stored_name("model.layers.0.mlp.gate.weight", stored) == "model.layers.0.block_sparse_moe.gate.weight"
    assert [name for name, _ in as_in_files("model.layers.0.mlp.gate.weight", router, stored)] == [
        "model.layers.0.block_sparse_moe.gate.weight"
    ]
    assert [name for name, _ in as_in_files("score.weight", router, stored)] == ["score.weight"]


def test_experts_that_files_do_not_have_are_not_guessed() -> None:
    assert expert_sources("model.layers.0.mlp.experts.gate_up_proj", {"model.norm.weight"}) is None
    assert expert_sources("model.layers.0.mlp.gate_proj.weight", set(_QWEN)) is None


def test_names_are_read_from_the_headers_of_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")

    assert names_in_files(tmp_path) == {"a", "b"}
