"""Training state in pieces: each rank writes the pieces of flattened weights and moments that it holds.

A piece is stored as `kind.name@start`, where `start` counts elements of the flattened tensor. Ranks write in parallel
and nothing is gathered. The same layout reads its own pieces back; another one reads those that overlap with its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rayrl.errors import CheckpointError

KINDS = ("weight", "exp_avg", "exp_avg_sq")
"""What is kept of each trained parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fragment:
    """A piece of one flattened tensor.

    Example: `Fragment(kind="exp_avg", name="model.norm.weight", start=16, values=tensor([...]))`.
    """

    kind: str
    """One of `KINDS`."""
    name: str
    """The parameter's name."""
    start: int
    """Index of the first element in the flattened tensor."""
    values: Tensor
    """[n] float32."""

    @property
    def key(self) -> str:
        """Name of the piece on disk."""
        return f"{self.kind}.{self.name}@{self.start}"


def load_fragments(
    folder: Path, fragments: Iterable[Fragment], sizes: Mapping[str, int], extra: Mapping[str, Tensor]
) -> None:
    """Fill the pieces of this rank in place, and those tensors of `extra` that are stored; collective.

    Args:
        fragments: what this rank needs, cut in any way.
        sizes: elements of every trained parameter, by name.

    CheckpointError if the folder is incomplete or of another model.
    """
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{str(folder)!r} holds no complete training state; choose another checkpoint")
    known = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    stored = _stored(known)
    _check_whole(folder, stored, sizes)
    needed = list(fragments)
    state: dict[str, Tensor] = {name: value for name, value in extra.items() if name in known}
    for fragment in needed:
        for start, length in _overlapping(stored[fragment.kind, fragment.name], fragment):
            key = f"{fragment.kind}.{fragment.name}@{start}"
            if key not in state:
                exact = start == fragment.start and length == fragment.values.numel()
                state[key] = fragment.values if exact else torch.empty(length)
    try:
        load(state, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    except (CheckpointException, ValueError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{str(folder)!r} cannot be read: {str(error).splitlines()[0]}") from error
    for fragment in needed:
        for start, length in _overlapping(stored[fragment.kind, fragment.name], fragment):
            piece = state[f"{fragment.kind}.{fragment.name}@{start}"]
            if piece is fragment.values:
                continue
            low, high = max(start, fragment.start), min(start + length, fragment.start + fragment.values.numel())
            fragment.values[low - fragment.start : high - fragment.start].copy_(piece[low - start : high - start])


def _stored(known: Mapping[str, object]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Return `(start, length)` of all stored pieces, in order, by kind and name."""
    stored: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for key, value in known.items():
        kind, _, rest = key.partition(".")
        name, mark, start = rest.rpartition("@")
        if kind in KINDS and mark and isinstance(value, TensorStorageMetadata):
            stored.setdefault((kind, name), []).append((int(start), value.size.numel()))
    return {key: sorted(pieces) for key, pieces in stored.items()}


def _check_whole(
    folder: Path, stored: Mapping[tuple[str, str], list[tuple[int, int]]], sizes: Mapping[str, int]
) -> None:
    wanted = {(kind, name) for kind in KINDS for name in sizes}
    missing, foreign = sorted(wanted - stored.keys()), sorted(stored.keys() - wanted)
    if missing or foreign:
        raise CheckpointError(
            f"{str(folder)!r} is of another model: it lacks {[name for _, name in missing[:3]] or 'nothing'} and has "
            f"{[name for _, name in foreign[:3]] or 'nothing'} besides; set model.path to the model of the run"
        )
    for (kind, name), pieces in stored.items():
        end = 0
        for start, length in pieces:
            if start != end:
                break
            end = start + length
        if end != sizes[name]:
            raise CheckpointError(
                f"{str(folder)!r} cannot be read: {kind} of {name} has {end} elements in one piece after another, the "
                f"model {sizes[name]}"
            )


def _overlapping(pieces: list[tuple[int, int]], fragment: Fragment) -> list[tuple[int, int]]:
    end = fragment.start + fragment.values.numel()
    return [(start, length) for start, length in pieces if start < end and fragment.start < start + length]
