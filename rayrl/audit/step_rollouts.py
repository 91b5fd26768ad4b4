"""One file of the rollout log, reduced to counts: which prompts, and how many loss-carrying tokens of which version."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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
    table = table.combine_chunks()
    ids = table["prompt_id"].to_pylist()
    failed = [value is not None for value in table["failure"].to_pylist()]
    truncated = [reason == "length" for reason in table["stop_reason"].to_pylist()]
    masks, versions = _ragged(table, "loss_mask"), _ragged(table, "versions")
    tokens: Counter[int] = Counter()
    cut: Counter[int] = Counter()
    spread: Counter[int] = Counter()
    oldest: list[int] = []
    faults: list[str] = []
    for row, (mask, version) in enumerate(zip(masks, versions, strict=True)):
        if len(mask) != len(version) or not np.array_equal(mask != 0, version >= 0):
            faults.append(f"trajectory {row} of {ids[row]}: versions do not cover exactly the sampled tokens")
            continue
        if failed[row]:
            continue
        values, counts = np.unique(version[mask != 0], return_counts=True)
        of_row = {int(value): int(count) for value, count in zip(values, counts, strict=True)}
        tokens.update(of_row)
        if truncated[row]:
            cut.update(of_row)
        if of_row:
            oldest.append(min(of_row))
            spread[len(of_row)] += 1
    return StepRollouts(
        prompts=Counter(ids),
        num_usable=len(ids) - sum(failed),
        tokens_by_version=tokens,
        truncated_by_version=cut,
        oldest=tuple(oldest),
        versions_per_trajectory=spread,
        faults=tuple(faults),
        digest=group_digest([table]),
    )


def _ragged(table: pa.Table, name: str) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    for chunk in table[name].chunks:
        offsets = chunk.offsets.to_numpy()
        values = chunk.flatten().to_numpy(zero_copy_only=False)
        rows.extend(np.split(values, offsets[1:-1] - offsets[0]) if len(chunk) else [])
    return rows
