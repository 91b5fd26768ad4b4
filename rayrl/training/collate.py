"""From rows to the tensors of one micro-batch.

Packed, rows stand end to end in one. Padded, they stand below each other and are filled up on the right: with causal
attention no token sees what stands behind it, so padding needs no mask and plain rows none at all; a micro-batch with a
shared row gets one mask for all its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rayrl.training.batch import TrainBatch
from rayrl.training.pack import Block, Pack
from rayrl.training.rows import Row

_PROMPT = -1
_PADDING = -2
_EMPTY_LENGTH = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """R rows of L tokens, and K predictions spread over N trajectories of at most S loss-carrying tokens."""

    input_ids: Tensor
    """[R, L] int64, padded with 0."""
    position_ids: Tensor
    """[R, L] int64 position of each token in its own trajectory."""
    attention_mask: Tensor | Pack | None
    """[R, 1, L, L] bool, True where the query (third) sees the key (fourth); None: plain causal attention; or the
    sequences of a packed row, of which there is only one."""
    sources: Tensor
    """[K] int64 index into the flattened rows of the token that predicts."""
    targets: Tensor
    """[K] int64 token that is predicted."""
    slots: Tensor
    """[K] int64 index into the flattened [N, S]."""
    loss_mask: Tensor
    """[N, S] bool; the tokens of a trajectory that carry loss stand first. No trajectory with only False but in an
    empty micro-batch, which has N = S = K = 1."""
    flat: Tensor
    """[K] int64 index into the flat columns of the batch; empty in an empty micro-batch."""
    trajectories: Tensor
    """[N] int64 indices into the batch; empty in an empty micro-batch."""

    def spread(self, values: Tensor) -> Tensor:
        """Return [K] values as [N, S], 0 where the mask is."""
        return values.new_zeros(self.loss_mask.numel()).scatter(0, self.slots, values).view(self.loss_mask.shape)

    def take(self, column: "np.ndarray | None") -> Tensor | None:
        """Return a flat column of the batch as float32 [N, S]; None for None."""
        if column is None:
            return None
        if self.flat.numel() == 0:
            return torch.zeros(self.loss_mask.shape, device=self.slots.device)
        values = torch.from_numpy(column[self.flat.cpu().numpy()].astype(np.float32)).to(self.slots.device)
        return self.spread(values)


def collate(
    batch: TrainBatch, rows: Sequence[Row], device: torch.device, multiple: int = 1, *, packed: bool = False
) -> MicroBatch:
    """Return the micro-batch of some rows; no rows give an empty one.

    Args:
        multiple: the length of the micro-batch is rounded up to a multiple of it.
        packed: lay the rows end to end in one, instead of below each other, as long as the longest.
    """
    num_rows, length = micro_shape(rows, multiple, packed=packed)
    if not rows:
        return _empty(device, length)
    if packed:
        # Rows of one length become one block of attention.
        rows = sorted(rows, key=lambda row: (-row.length, row.is_shared))
    starts = np.cumsum([0, *(row.length for row in rows)])[:-1] if packed else np.arange(num_rows) * length
    ids = np.zeros(num_rows * length, dtype=np.int64)
    positions = np.tile(np.arange(length, dtype=np.int64), num_rows)
    segments = np.full(num_rows * length, _PADDING, dtype=np.int64)
    sources: list[np.ndarray] = []
    flat: list[np.ndarray] = []
    for row, start in zip(rows, starts.tolist(), strict=True):
        part = slice(start, start + row.length)
        of_row = _place(batch, row, ids[part], positions[part], segments[part])
        sources.extend(start + source for source in of_row[0])
        flat.extend(of_row[1])
    counts = [len(part) for part in flat]
    width = max(counts)
    where = np.concatenate(flat)
    shape = (num_rows, length)
    return MicroBatch(
        input_ids=_to(ids.reshape(shape), device),
        position_ids=_to(positions.reshape(shape), device),
        attention_mask=_attention(rows, starts, segments.reshape(shape), device, packed=packed),
        sources=_to(np.concatenate(sources), device),
        targets=_to(batch.tokens[where], device),
        slots=_to(np.concatenate([number * width + np.arange(count) for number, count in enumerate(counts)]), device),
        loss_mask=_to(np.arange(width)[None, :] < np.asarray(counts)[:, None], device),
        flat=_to(where, device),
        trajectories=_to(np.asarray([index for row in rows for index in row.trajectories]), device),
    )


def micro_shape(rows: Sequence[Row], multiple: int = 1, *, packed: bool = False) -> tuple[int, int]:
    """Return rows and length of the micro-batch that `collate` makes of some rows."""
    lengths = [row.length for row in rows] or [_EMPTY_LENGTH]
    length = sum(lengths) if packed else max(lengths)
    return 1 if packed else len(lengths), -(-length // multiple) * multiple


def _place(
    batch: TrainBatch, row: Row, ids: np.ndarray, positions: np.ndarray, segments: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Fill the tokens of one row in place; return, by trajectory, where predictions are made and of which tokens."""
    cursor = row.num_shared
    first = batch.offsets[row.trajectories[0]]
    ids[:cursor] = batch.tokens[first : first + cursor]
    positions[:cursor] = np.arange(cursor)
    segments[:cursor] = _PROMPT
    sources: list[np.ndarray] = []
    flat: list[np.ndarray] = []
    for segment, (index, end) in enumerate(zip(row.trajectories, row.ends, strict=True)):
        start, count = batch.offsets[index], end - row.num_shared
        ids[cursor : cursor + count] = batch.tokens[start + row.num_shared : start + end]
        positions[cursor : cursor + count] = np.arange(row.num_shared, end)
        segments[cursor : cursor + count] = segment
        predicted = np.flatnonzero(batch.loss_mask[start : start + end + 1])
        before = predicted - 1
        shift = np.where(before < row.num_shared, 0, cursor - row.num_shared)
        sources.append(before + shift)
        flat.append(start + predicted)
        cursor += count
    return sources, flat


def _attention(
    rows: Sequence[Row], starts: np.ndarray, segments: np.ndarray, device: torch.device, *, packed: bool
) -> Tensor | Pack | None:
    if not packed:
        return _mask(segments, device) if any(row.is_shared for row in rows) else None
    blocks: list[Block] = []
    for row, start in zip(rows, starts.tolist(), strict=True):
        last = blocks[-1] if blocks else None
        if not row.is_shared and last is not None and last.mask is None and last.length == row.length:
            blocks[-1] = replace(last, count=last.count + 1)
            continue
        mask = _mask(segments[:, start : start + row.length], device)[0, 0] if row.is_shared else None
        blocks.append(Block(start=start, count=1, length=row.length, mask=mask))
    return Pack(blocks=tuple(blocks))


def _mask(segments: np.ndarray, device: torch.device) -> Tensor:
    """Return [R, 1, L, L]: causal, within the own segment or to the prompt. Every token sees itself."""
    segment = torch.from_numpy(segments).to(device)
    length = segment.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    same = segment[:, :, None] == segment[:, None, :]
    return (causal & (same | (segment == _PROMPT)[:, None, :])).unsqueeze(1)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return (tensor if tensor.dtype == torch.bool else tensor.long()).to(device)


def _empty(device: torch.device, length: int) -> MicroBatch:
    """Return a micro-batch that runs through the whole model and has no loss: all parameters get a gradient of 0."""
    zero, none = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(0, dtype=torch.long, device=device)
    return MicroBatch(
        input_ids=torch.zeros(1, length, dtype=torch.long, device=device),
        position_ids=torch.arange(length, device=device)[None, :],
        attention_mask=None,
        sources=zero,
        targets=zero,
        slots=zero,
        loss_mask=torch.zeros(1, 1, dtype=torch.bool, device=device),
        flat=none,
        trajectories=none,
    )
