"""Trained weights to an ordinary Hugging Face folder, complete or not at all."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rayrl.errors import ModelError
from rayrl.models.expert_names import as_in_files, names_in_files
from rayrl.models.folder import check_model_folder
from rayrl.models.staging import staged_folder

MAX_SHARD_BYTES = 5_000_000_000
"""Largest weight file, as the hub's tools write it; one larger tensor still gets a file of its own."""

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
_WEIGHT_INDEX = "*.index.json"


def export_hf_folder(
    state: Mapping[str, Tensor],
    source: Path,
    target: Path,
    *,
    replace: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config_changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write `state` with the config and tokenizer of `source` as the model folder `target`, and return it.

    Args:
        state: full tensors by their names in the model; each is written in its own dtype. A tensor that shares
            its storage with an earlier one (tied embeddings) is left out: loading ties it again.
        source: model folder that was trained; of its weight files only the names are read, and used where they differ
            from those of the model (experts).
        target: new folder; invisible until it is complete.
        replace: overwrite `target` if it exists.
        max_shard_bytes: largest weight file.
        config_changes: keys of config.json that the trained model has otherwise than `source`.

    Raises FileExistsError if `target` exists and `replace` is off, ModelError if `source` is no model folder, ties
    its embeddings where `state` does not, or `state` is empty.
    """
    check_model_folder(source)
    if not state:
        raise ModelError("there are no weights to export")
    tensors = _without_shared(state)
    _check_tied(tensors, source)
    stored = names_in_files(source)
    tensors = dict(piece for name, tensor in tensors.items() for piece in as_in_files(name, tensor, stored))
    with staged_folder(target, replace=replace) as staging:
        for pattern in _COPIED:
            for file in source.glob(pattern):
                if not file.match(_WEIGHT_INDEX):
                    shutil.copy(file, staging / file.name)
        _write_config(staging / "config.json", tensors, config_changes or {})
        _write_weights(tensors, staging, max_shard_bytes)
    return target


def _without_shared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor
    return kept


def _check_tied(tensors: dict[str, Tensor], source: Path) -> None:
    """Drop an equal copy of tied embeddings; loading would ignore it. ModelError if the two have drifted apart."""
    tied = json.loads((source / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False)
    head = tensors.get("lm_head.weight")
    embedding = tensors.get("model.embed_tokens.weight")
    if not tied or head is None or embedding is None:
        return
    if not head.equal(embedding):
        raise ModelError(f"{str(source)!r} ties its embeddings, but lm_head and embed_tokens differ after training")
    del tensors["lm_head.weight"]


def _write_config(config_file: Path, tensors: Mapping[str, Tensor], changes: Mapping[str, Any]) -> None:
    config = json.loads(config_file.read_text(encoding="utf-8")) | dict(changes)
    floating = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    if floating:
        config.pop("torch_dtype", None)
        config["dtype"] = str(floating[0]).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_weights(tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
    shards = list(_shards(tensors, max_shard_bytes))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if names and num_bytes + tensor.nbytes > max_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += tensor.nbytes
    yield names
