"""Weights from a model folder into a sharded model: each rank reads its own part of each tensor, and no more.

The model is made without weights (parameters on the meta device), split and sharded, and only then given memory. The
part of a rank follows from the placements of a parameter: the splits over `tensor` or `expert` come first, that of
`fully_shard` cuts what they leave.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rayrl.errors import ModelError
from rayrl.models.expert_names import expert_sources, stored_name
from rayrl.training.expert_halves import half_regions, is_halved, whole_shape
from rayrl.training.gradients import local

_SCALAR_HEAD = "score.weight"


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device by uninitialised ones, in place; buffers keep their values, ties hold."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, first_name), *others in tied.values():
        for module, name in others:
            module.register_parameter(name, first.get_parameter(first_name))
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def load_parts(weights: Mapping[str, nn.Parameter], folder: Path) -> int:
    """Fill the parts of this rank from the safetensors files of a folder, and return the bytes that were read.

    A scalar head that the folder lacks becomes 0. ModelError for any other weight that it lacks.
    """
    files = _Files(folder)
    num_bytes = 0
    with torch.no_grad():
        for name, parameter in weights.items():
            part = local(parameter)
            if name == _SCALAR_HEAD and name not in files:
                part.zero_()
                continue
            values = _read(files, name, parameter)
            num_bytes += values.nbytes
            part.copy_(values)
    return num_bytes


def own_region(parameter: Tensor) -> tuple[slice, ...]:
    """Return which part of the whole tensor this rank holds."""
    region = [slice(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return tuple(region)
    mesh = parameter.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "every rank is part of the mesh"
    # Axes of `fully_shard` stand first and cut what the others leave.
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        dim = _divided_dim(placement)
        if dim is not None:
            region[dim] = _cut(region[dim], mesh.size(axis), coordinates[axis])
    return tuple(region)


def _read(files: "_Files", name: str, parameter: Tensor) -> Tensor:
    region, shape = own_region(parameter), whole_shape(name, parameter)
    if not is_halved(name, parameter):
        return files.read(name, region, shape)
    halves = half_regions(tuple(parameter.shape), region)
    return torch.stack([files.read(name, half, shape) for half in halves], dim=1)


def _divided_dim(placement: Any) -> int | None:
    """Return the dimension that a placement divides, None if it divides none."""
    return placement.dim if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard" else None


def _cut(whole: slice, parts: int, index: int) -> slice:
    """Return a part of a range as `torch.chunk` makes it; the last parts may be short or empty."""
    size = whole.stop - whole.start
    step = -(-size // parts)
    return slice(whole.start + min(index * step, size), whole.start + min((index + 1) * step, size))


class _Files:
    """The tensors in the safetensors files of a model folder, read in parts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            opened = safe_open(str(path), framework="pt")
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, region: tuple[slice, ...], shape: tuple[int, ...]) -> Tensor:
        """Return a region of the weight that the model calls `name`."""
        stored = stored_name(name, self._file_of)
        if stored is not None:
            return self._slice(stored, region, shape)
        sources = expert_sources(name, self._file_of)
        if sources is None:
            raise ModelError(
                f"model folder {str(self._folder)!r} has no weight {name!r} in its safetensors files; set "
                f"training.engine.sharded_load=false to load it as transformers does"
            )
        # Rows of a fused weight are those of its sources, one after another, in each expert.
        rows = shape[1] // len(sources[0])
        inside = [
            slice(max(region[1].start - start, 0), max(min(region[1].stop - start, rows), 0))
            for start in range(0, shape[1], rows)
        ]
        experts = [
            torch.cat(
                [
                    self._slice(source, (part, *region[2:]), None)
                    for source, part in zip(sources[number], inside, strict=True)
                    if part.start < part.stop
                ]
            )
            for number in range(region[0].start, region[0].stop)
        ]
        whole = [part.stop - part.start for part in region]
        return torch.stack(experts) if experts else torch.empty(whole)

    def _slice(self, name: str, region: tuple[slice, ...], shape: tuple[int, ...] | None) -> Tensor:
        handle = self._file_of[name].get_slice(name)
        stored = tuple(handle.get_shape())
        if shape is not None and stored != shape:
            raise ModelError(
                f"weight {name!r} in {str(self._folder)!r} has shape {stored}, the model of its config.json {shape}"
            )
        values: Tensor = handle[region]
        return values
