"""One file of the rollout log, reduced to counts: which prompts, and how many loss-carrying tokens of which version."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrl.checkpoint.group_digest import group_digest
from rayrl.tracking.rollout_log import read_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """What a step consumed, recomputed from its Parquet file; trajectories with a failure carry no loss."""

    prompts: Mapping[str, int]
    """Rows of each prompt id."""
    num_usable: int
    """Trajectories without a failure."""
    tokens_by_version: Mapping[int, int]
    """Loss-carrying tokens by the version that sampled them, before any masking."""
    truncated_by_version: Mapping[int, int]
    """Those of trajectories that ended by length; `shaping.mask_truncated` takes them out."""
    oldest: tuple[int, ...]
    """Oldest version among the loss-carrying tokens of each usable trajectory that has some."""
    versions_per_trajectory: Mapping[int, int]
    """How many usable trajectories carry how many versions."""
    faults: tuple[str, ...]
    """Rows that contradict themselves."""
    digest: str
    """Of all rows, as the trainer computed it of what it consumed."""


def read_step(path: Path) -> StepRollouts:
    """Read one file. Raises OSError or pyarrow's errors as they come if it is missing or damaged."""
    return reduce_step(read_rollouts(path))


def reduce_step(table: pa.Table) -> StepRollouts:
    """Return the counts of the trajectories of one step."""
    ids = table["prompt_id"].to_pylist()
    failed = np.asarray([value is not None for value in table["failure"].to_pylist()], dtype=bool)
    truncated = np.asarray([reason == "length" for reason in table["stop_reason"].to_pylist()], dtype=bool)
    mask, lengths = _flat(table, "loss_mask")
    versions, version_lengths = _flat(table, "versions")
    if not np.array_equal(lengths, version_lengths):
        raise ValueError("masks and versions of a trajectory differ in length")
    owner = np.repeat(np.arange(len(ids)), lengths)
    odd = np.unique(owner[(mask != 0) != (versions >= 0)])
    failed[odd] = True  # counted with nothing: what they would say is not known
    live = (mask != 0) & ~failed[owner]
    # One number for each trajectory and version that it carries; the versions of a trajectory stand in order.
    pairs = np.unique(owner[live] << 32 | versions[live].astype(np.int64))
    _, first, spread = np.unique(pairs >> 32, return_index=True, return_counts=True)
    return StepRollouts(
        prompts=Counter(ids),
        num_usable=len(ids) - int(failed.sum()),
        tokens_by_version=_counts(versions[live]),
        truncated_by_version=_counts(versions[live & truncated[owner]]),
        oldest=tuple((pairs[first] & 0xFFFFFFFF).tolist()),
        versions_per_trajectory=_counts(spread),
        faults=tuple(
            f"trajectory {row} of {ids[row]}: versions do not cover exactly the sampled tokens" for row in odd
        ),
        digest=group_digest([table]),
    )


def _counts(values: npt.NDArray[np.integer]) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _flat(table: pa.Table, name: str) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    """Return all values of a list column, and the length of each list."""
    values, lengths = [], []
    for chunk in table[name].chunks:
        values.append(chunk.flatten().to_numpy(zero_copy_only=False))
        lengths.append(np.diff(chunk.offsets.to_numpy()))
    if not values:
        return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
    return np.concatenate(values), np.concatenate(lengths).astype(np.int64)
