import json
import shutil
from pathlib import Path

import pytest
import torch

from rayrl.errors import ModelError
from rayrl.models.export import export_hf_folder
from rayrl.models.loading import load_causal_lm
from rayrl.models.tokenizer import load_tokenizer


def _changed_state(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in load_causal_lm(folder).state_dict().items()}


def test_exported_folder_loads_with_the_given_weights_and_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    state = _changed_state(tiny_folder)
    target = export_hf_folder(state, tiny_folder, tmp_path / "out")
    loaded = load_causal_lm(target).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert load_tokenizer(target).encode("1+2") == load_tokenizer(tiny_folder).encode("1+2")


def test_weights_are_spread_over_shards_when_they_exceed_the_limit(tiny_folder: Path, tmp_path: Path) -> None:
    state = _changed_state(tiny_folder)
    target = export_hf_folder(state, tiny_folder, tmp_path / "out", max_shard_bytes=4000)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    loaded = load_causal_lm(target).state_dict()
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_config_names_the_dtype_that_was_written(tiny_folder: Path, tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in _changed_state(tiny_folder).items()}
    target = export_hf_folder(state, tiny_folder, tmp_path / "out")
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


def test_nothing_is_left_when_writing_fails(tiny_folder: Path, tmp_path: Path) -> None:
    class BrokenTensor(torch.Tensor):
        def detach(self) -> torch.Tensor:
            raise RuntimeError("device lost")

    state = dict(_changed_state(tiny_folder))
    state["model.norm.weight"] = state["model.norm.weight"].as_subclass(BrokenTensor)
    with pytest.raises(RuntimeError, match="device lost"):
        export_hf_folder(state, tiny_folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_existing_target_is_kept_unless_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    first = load_causal_lm(tiny_folder).state_dict()
    export_hf_folder(first, tiny_folder, target)
    with pytest.raises(FileExistsError):
        export_hf_folder(_changed_state(tiny_folder), tiny_folder, target)
    assert torch.equal(load_causal_lm(target).state_dict()["lm_head.weight"], first["lm_head.weight"])
    export_hf_folder(_changed_state(tiny_folder), tiny_folder, target, replace=True)
    assert torch.equal(load_causal_lm(target).state_dict()["lm_head.weight"], first["lm_head.weight"] + 1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _tied_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "tied"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


@pytest.mark.parametrize("copied", [False, True])
def test_tied_embeddings_are_written_once_and_tied_again(tiny_folder: Path, tmp_path: Path, copied: bool) -> None:
    from safetensors import safe_open

    folder = _tied_folder(tiny_folder, tmp_path)
    state = dict(load_causal_lm(tiny_folder).state_dict())
    embedding = state["model.embed_tokens.weight"]
    state["lm_head.weight"] = embedding.clone() if copied else embedding
    target = export_hf_folder(state, folder, tmp_path / "out")
    with safe_open(target / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = load_causal_lm(target)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded.get_input_embeddings().weight, embedding)


def test_tied_embeddings_are_refused_when_they_drifted_apart(tiny_folder: Path, tmp_path: Path) -> None:
    folder = _tied_folder(tiny_folder, tmp_path)
    with pytest.raises(ModelError, match="ties its embeddings"):
        export_hf_folder(load_causal_lm(tiny_folder).state_dict(), folder, tmp_path / "out")


def test_empty_state_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        export_hf_folder({}, tiny_folder, tmp_path / "out")
