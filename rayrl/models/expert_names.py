"""Names of experts: models keep all experts of a layer in one tensor, their files have a tensor for each expert.

    in the model                                    in the files
    model.layers.0.mlp.experts.gate_up_proj         model.layers.0.mlp.experts.3.gate_proj.weight, .up_proj.weight
    model.layers.0.mlp.experts.down_proj            model.layers.0.mlp.experts.3.down_proj.weight

Mixtral calls the block `block_sparse_moe` and the three matrices `w1`, `w3` and `w2` in its files.
"""

import re
from collections.abc import Container, Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

_FUSED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_BLOCKS = (".mlp.", ".block_sparse_moe.")


def names_in_files(folder: Path) -> set[str]:
    """Return the names of all tensors in the safetensors files of a folder; only their headers are read."""
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            names |= set(file.keys())
    return names


def as_in_files(name: str, tensor: Tensor, stored: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight of the model under the names, and in the pieces, that the files have; itself if they have none."""
    whole = stored_name(name, stored)
    sources = None if whole is not None else expert_sources(name, stored)
    if sources is None:
        yield whole or name, tensor
        return
    for number, parts in enumerate(sources):
        for part, rows in zip(parts, tensor[number].chunk(len(parts)), strict=True):
            yield part, rows.clone()


def expert_sources(name: str, stored: Container[str]) -> list[tuple[str, ...]] | None:
    """Return for each expert the names in the files whose rows make up the model's weight `name`, in order.

    None if it is no tensor of experts, or the files have nothing of it.
    """
    match = re.fullmatch(r"(.*\.experts\.)(gate_up_proj|down_proj)", name)
    if match is None:
        return None
    for block in _BLOCKS:
        prefix = match[1].replace(".mlp.", block)
        for parts in _FUSED[match[2]]:
            if f"{prefix}0.{parts[0]}.weight" in stored:
                return list(_experts(prefix, parts, stored))
    return None


def stored_name(name: str, stored: Container[str]) -> str | None:
    """Return the name in the files of a weight that they keep as a whole; None if they have none."""
    return next((other for block in _BLOCKS if (other := name.replace(".mlp.", block)) in stored), None)


def _experts(prefix: str, parts: tuple[str, ...], stored: Container[str]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    while f"{prefix}{len(found)}.{parts[0]}.weight" in stored:
        found.append(tuple(f"{prefix}{len(found)}.{part}.weight" for part in parts))
    return found
