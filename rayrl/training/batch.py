"""From Arrow record batches to ragged columns: every rank holds all trajectories of a step and computes its share.

Advantages and denominators are computed over the whole batch on each rank, by the same code on the same data; they
need no communication and cannot depend on the layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """N trajectories with all their tokens, one after the other; those of i stand at `offsets[i]:offsets[i + 1]`.

    Example, two trajectories of lengths 3 and 2: `tokens=[5, 6, 7, 5, 8] loss_mask=[0, 1, 1, 0, 1] offsets=[0, 3, 5]`.
    Arrays may be read-only views of shared memory.
    """

    tokens: npt.NDArray[np.int32]
    """[sum T] token ids."""
    loss_mask: npt.NDArray[np.uint8]
    """[sum T] 1 where the token carries loss."""
    logprobs: FloatArray
    """[sum T] as the engine reported them when it sampled."""
    versions: npt.NDArray[np.int32]
    """[sum T] version that sampled the token; -1 where none did."""
    offsets: IntArray
    """[N + 1] where each trajectory begins; the last entry is sum T."""
    rewards: FloatArray
    """[N] rewards."""
    group_ids: IntArray
    """[N] trajectories with the same id share a prompt; 0 .. number of groups - 1, in order of appearance."""
    truncated: npt.NDArray[np.bool_] | None = None
    """[N] True where the completion ended by length; None: unknown, taken as False."""
    advantages: FloatArray | None = None
    """[sum T] advantage of each loss-carrying token; None for supervised batches."""
    proximal_logprobs: FloatArray | None = None
    """[sum T] under the policy at the centre of the clip; None: the one before this optimizer step."""
    ref_logprobs: FloatArray | None = None
    """[sum T] under the reference policy; None if there is none."""
    values: FloatArray | None = None
    """[sum T] of the critic before this step, for the state in which the token was sampled; None without a critic."""
    returns: FloatArray | None = None
    """[sum T] what the critic has to learn; None without a critic."""
    token_penalties: FloatArray | None = None
    """[sum T] taken off the reward of each token, for advantages that read rewards per token; None: nothing."""
    held_back: npt.NDArray[np.uint8] | None = None
    """[sum T] 1 for tokens that the objective treats apart in this optimizer step; None if none were chosen."""

    teacher_logprobs: FloatArray | None = None
    """[sum T] of the loss-carrying tokens under the teacher; None without one."""

    @property
    def num_trajectories(self) -> int:
        """N."""
        return len(self.rewards)

    @property
    def loss_counts(self) -> IntArray:
        """[N] tokens that carry loss, per trajectory."""
        cumulative = np.concatenate(([0], np.cumsum(self.loss_mask != 0)))
        counts: IntArray = cumulative[self.offsets[1:]] - cumulative[self.offsets[:-1]]
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessStats:
    """Ages of a batch, before stale tokens are masked."""

    num_stale_tokens: int
    """Tokens that lose their loss because of their age."""
    num_tokens: int
    """Tokens that carried loss before."""
    mean_age: float
    """Mean over trajectories of the version now minus the oldest version among their loss-carrying tokens."""
    max_age: int
    """The largest of these ages."""


def batch_from_arrow(batches: Sequence[pa.RecordBatch]) -> tuple[TrainBatch, int]:
    """Return the usable trajectories, and how many were left out because they carry a failure.

    A single batch without failures is not copied. The first token of a trajectory cannot carry loss, as nothing
    predicts it: ValueError if one does, or if the columns of a trajectory differ in length.
    """
    num_rows = sum(batch.num_rows for batch in batches)
    usable = [
        batch if batch["failure"].null_count == batch.num_rows else batch.filter(batch["failure"].is_null())
        for batch in batches
    ]
    table = [batch for batch in usable if batch.num_rows]
    lengths = _join([_lengths(batch["tokens"]) for batch in table], np.int64)
    for name in ("loss_mask", "logprobs", "versions"):
        if not np.array_equal(_join([_lengths(batch[name]) for batch in table], np.int64), lengths):
            raise ValueError(f"training batch: lengths of {name} differ from those of tokens")
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    batch = TrainBatch(
        tokens=_join([_values(batch["tokens"]) for batch in table], np.int32),
        loss_mask=_join([_values(batch["loss_mask"]) for batch in table], np.uint8),
        logprobs=_join([_values(batch["logprobs"]) for batch in table], np.float32),
        versions=_join([_values(batch["versions"]) for batch in table], np.int32),
        offsets=offsets,
        rewards=_join([batch["reward"].to_numpy(zero_copy_only=False) for batch in table], np.float32),
        group_ids=_group_ids([batch["prompt_id"] for batch in table]),
        truncated=np.asarray(
            [reason == "length" for batch in table for reason in batch["stop_reason"].to_pylist()], dtype=np.bool_
        ),
        teacher_logprobs=_optional_column(table, "teacher_logprobs"),
    )
    if lengths.size and (lengths.min() == 0 or batch.loss_mask[offsets[:-1]].any()):
        raise ValueError("training batch: a trajectory is empty, or its first token carries loss")
    return batch, num_rows - batch.num_trajectories


def mask_stale(batch: TrainBatch, version: int, min_version: int | None) -> tuple[TrainBatch, StalenessStats]:
    """Take tokens of versions below `min_version` out of the loss, and count ages from `version`."""
    live = batch.loss_mask != 0
    stale = np.zeros_like(live) if min_version is None else live & (batch.versions < min_version)
    oldest = _oldest_versions(batch, live)
    ages = version - oldest[oldest != _NEVER]
    stats = StalenessStats(
        num_stale_tokens=int(stale.sum()),
        num_tokens=int(live.sum()),
        mean_age=float(ages.mean()) if ages.size else 0.0,
        max_age=int(ages.max()) if ages.size else 0,
    )
    if stats.num_stale_tokens == 0:
        return batch, stats
    return replace(batch, loss_mask=(live & ~stale).astype(np.uint8)), stats


def split_groups(batch: TrainBatch, num_parts: int) -> list[TrainBatch]:
    """Return the batch in `num_parts` parts of whole groups, in order, their numbers as equal as possible.

    With fewer groups than parts (after failures) the last parts are left out.
    """
    if num_parts == 1:
        return [batch]
    num_groups = int(batch.group_ids.max(initial=-1)) + 1
    bounds = np.linspace(0, num_groups, num_parts + 1).round().astype(np.int64)
    chosen = [np.flatnonzero((batch.group_ids >= low) & (batch.group_ids < high)) for low, high in pairwise(bounds)]
    return [select(batch, indices) for indices in chosen if indices.size]


def select(batch: TrainBatch, indices: IntArray) -> TrainBatch:
    """Return the trajectories at `indices`, in that order."""
    lengths = np.diff(batch.offsets)[indices]
    flat = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in indices])
    return TrainBatch(
        tokens=batch.tokens[flat],
        loss_mask=batch.loss_mask[flat],
        logprobs=batch.logprobs[flat],
        versions=batch.versions[flat],
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        rewards=batch.rewards[indices],
        group_ids=batch.group_ids[indices],
        truncated=None if batch.truncated is None else batch.truncated[indices],
        advantages=_pick(batch.advantages, flat),
        proximal_logprobs=_pick(batch.proximal_logprobs, flat),
        ref_logprobs=_pick(batch.ref_logprobs, flat),
        values=_pick(batch.values, flat),
        returns=_pick(batch.returns, flat),
        token_penalties=_pick(batch.token_penalties, flat),
        held_back=None if batch.held_back is None else batch.held_back[flat],
        teacher_logprobs=_pick(batch.teacher_logprobs, flat),
    )


def _pick(column: FloatArray | None, flat: IntArray) -> FloatArray | None:
    return None if column is None else column[flat]


_NEVER = np.iinfo(np.int32).max


def _oldest_versions(batch: TrainBatch, live: npt.NDArray[np.bool_]) -> IntArray:
    """Return [N] the oldest version among the loss-carrying tokens; `_NEVER` where there are none."""
    if batch.num_trajectories == 0:
        return np.zeros(0, dtype=np.int64)
    versions = np.where(live, batch.versions, _NEVER)
    return np.minimum.reduceat(versions, batch.offsets[:-1]).astype(np.int64)


def _values(column: pa.ListArray) -> npt.NDArray[np.generic]:
    # `flatten` honours the offset of a slice, `values` would not.
    values: npt.NDArray[np.generic] = column.flatten().to_numpy(zero_copy_only=True)
    return values


def _optional_column(table: Sequence[pa.RecordBatch], name: str) -> FloatArray | None:
    """Return a column that only some runs have; None if a batch is without it."""
    if not table or any(name not in batch.schema.names for batch in table):
        return None
    return _join([_values(batch[name]) for batch in table], np.float32)


def _lengths(column: pa.ListArray) -> IntArray:
    lengths: IntArray = np.diff(column.offsets.to_numpy(zero_copy_only=True)).astype(np.int64)
    return lengths


def _join(parts: Sequence[npt.NDArray[np.generic]], dtype: type) -> npt.NDArray:
    """Return the parts in one array; a single part is not copied."""
    if not parts:
        return np.zeros(0, dtype=dtype)
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(dtype, copy=False)


def _group_ids(columns: Sequence[pa.StringArray]) -> IntArray:
    known: dict[str, int] = {}
    return np.asarray(
        [known.setdefault(name, len(known)) for column in columns for name in column.to_pylist()], dtype=np.int64
    )
