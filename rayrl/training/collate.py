"""From rows to the tensors of one micro-batch.

Rows are padded on the right. With causal attention no token sees what stands behind it, so padding needs no mask and
plain rows none at all; a micro-batch with a shared row gets one mask for all its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayrl.training.batch import TrainBatch
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
    attention_mask: Tensor | None
    """[R, 1, L, L] bool, True where the query (third) sees the key (fourth); None: plain causal attention."""
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


def collate(batch: TrainBatch, rows: Sequence[Row], device: torch.device, multiple: int = 1) -> MicroBatch:
    """Return the micro-batch of some rows, as long as the longest, rounded up; no rows give an empty one.

    Args:
        multiple: the length of the rows is a multiple of it.
    """
    num_rows, length = micro_shape(rows, multiple)
    if not rows:
        return _empty(device, length)
    ids = np.zeros((num_rows, length), dtype=np.int64)
    positions = np.tile(np.arange(length, dtype=np.int64), (num_rows, 1))
    segments = np.full((num_rows, length), _PADDING, dtype=np.int64)
    sources: list[np.ndarray] = []
    flat: list[np.ndarray] = []
    for number, row in enumerate(rows):
        cursor = row.num_shared
        first = batch.offsets[row.trajectories[0]]
        ids[number, :cursor] = batch.tokens[first : first + cursor]
        segments[number, :cursor] = _PROMPT
        for segment, (index, end) in enumerate(zip(row.trajectories, row.ends, strict=True)):
            start, count = batch.offsets[index], end - row.num_shared
            ids[number, cursor : cursor + count] = batch.tokens[start + row.num_shared : start + end]
            positions[number, cursor : cursor + count] = np.arange(row.num_shared, end)
            segments[number, cursor : cursor + count] = segment
            predicted = np.flatnonzero(batch.loss_mask[start : start + end + 1])
            before = predicted - 1
            shift = np.where(before < row.num_shared, 0, cursor - row.num_shared)
            sources.append(number * length + before + shift)
            flat.append(start + predicted)
            cursor += count
    mask = _mask(segments, device) if any(row.is_shared for row in rows) else None
    counts = [len(part) for part in flat]
    width = max(counts)
    where = np.concatenate(flat)
    return MicroBatch(
        input_ids=_to(ids, device),
        position_ids=_to(positions, device),
        attention_mask=mask,
        sources=_to(np.concatenate(sources), device),
        targets=_to(batch.tokens[where], device),
        slots=_to(np.concatenate([number * width + np.arange(count) for number, count in enumerate(counts)]), device),
        loss_mask=_to(np.arange(width)[None, :] < np.asarray(counts)[:, None], device),
        flat=_to(where, device),
        trajectories=_to(np.asarray([index for row in rows for index in row.trajectories]), device),
    )


def micro_shape(rows: Sequence[Row], multiple: int = 1) -> tuple[int, int]:
    """Return rows and length of the micro-batch that `collate` makes of some rows."""
    longest = max((row.length for row in rows), default=_EMPTY_LENGTH)
    return max(len(rows), 1), -(-longest // multiple) * multiple


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
