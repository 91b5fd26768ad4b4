"""From Arrow to columns: failures out, groups by prompt, stale tokens out of the loss."""

import numpy as np
import pyarrow as pa
import pytest
from samples import random_groups, trajectory

from rayrl.training.batch import batch_from_arrow, mask_stale, select, split_groups
from rayrl.types.arrow import TRAJECTORY_SCHEMA, trajectories_to_batch
from rayrl.types.prompt import PromptId
from rayrl.types.trajectory import FailureRecord, Trajectory, VersionSpan


def _of_two_versions() -> pa.RecordBatch:
    item = Trajectory(
        prompt_id=PromptId(dataset="d", epoch=0, ordinal=9),
        sample_index=0,
        tokens=(4, 5, 6, 7, 8),
        loss_mask=(0, 0, 1, 1, 1),
        logprobs=(0.0, 0.0, -1.0, -2.0, -3.0),
        spans=(VersionSpan(start=2, end=3, version=3), VersionSpan(start=3, end=5, version=5)),
        reward=1.0,
        stop_reason="stop",
    )
    return trajectories_to_batch([item])


def test_columns_hold_what_the_trajectories_held_when_batches_are_joined() -> None:
    first = trajectories_to_batch([trajectory(0, [2, 3], [4], reward=1.0), trajectory(0, [2, 3], [5, 6], reward=0.5)])
    second = trajectories_to_batch([trajectory(1, [7], [8, 9], reward=-1.0, version=4)])

    batch, num_failed = batch_from_arrow([first, second])

    assert num_failed == 0
    assert batch.tokens.tolist() == [2, 3, 4, 2, 3, 5, 6, 7, 8, 9]
    assert batch.offsets.tolist() == [0, 3, 7, 10]
    assert batch.loss_mask.tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 1]
    assert batch.versions.tolist() == [-1, -1, 0, -1, -1, 0, 0, -1, 4, 4]
    assert batch.rewards.tolist() == [1.0, 0.5, -1.0]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.loss_counts.tolist() == [1, 2, 2]


def test_a_single_batch_is_not_copied() -> None:
    record_batch = random_groups(num_groups=1)[0]

    batch, _ = batch_from_arrow([record_batch])

    values = record_batch["tokens"].values
    assert batch.tokens.__array_interface__["data"][0] == values.to_numpy().__array_interface__["data"][0]


def test_a_sliced_batch_gives_its_own_rows_only() -> None:
    record_batch = trajectories_to_batch([trajectory(0, [2], [3, 4]), trajectory(1, [5, 6], [7])])

    batch, _ = batch_from_arrow([record_batch.slice(1, 1)])

    assert batch.tokens.tolist() == [5, 6, 7]
    assert batch.offsets.tolist() == [0, 3]


def test_failures_are_left_out_and_counted() -> None:
    failure = FailureRecord(kind="reward", message="ValueError: no")
    record_batch = trajectories_to_batch(
        [trajectory(0, [2], [3, 4]), trajectory(0, [2], [5], failure=failure), trajectory(0, [2], [6], reward=1.0)]
    )

    batch, num_failed = batch_from_arrow([record_batch])

    assert num_failed == 1
    assert batch.tokens.tolist() == [2, 3, 4, 2, 6]
    assert batch.rewards.tolist() == [0.0, 1.0]


def test_a_batch_of_failures_only_is_empty() -> None:
    failure = FailureRecord(kind="timeout", message="late")

    batch, num_failed = batch_from_arrow([trajectories_to_batch([trajectory(0, [2], [3], failure=failure)])])

    assert (batch.num_trajectories, num_failed) == (0, 1)
    assert mask_stale(batch, 3, 2)[1].num_tokens == 0


def test_loss_on_the_first_token_is_refused() -> None:
    record_batch = trajectories_to_batch([trajectory(0, [], [3, 4])])

    with pytest.raises(ValueError, match="first token"):
        batch_from_arrow([record_batch])


def test_columns_of_different_length_are_refused() -> None:
    row = trajectories_to_batch([trajectory(0, [2], [3, 4])]).to_pylist()[0]
    record_batch = pa.RecordBatch.from_pylist([row | {"versions": [0]}], schema=TRAJECTORY_SCHEMA)

    with pytest.raises(ValueError, match="versions"):
        batch_from_arrow([record_batch])


def test_tokens_below_the_oldest_allowed_version_leave_the_loss() -> None:
    batch, _ = batch_from_arrow([_of_two_versions()])

    masked, stats = mask_stale(batch, version=6, min_version=4)

    assert masked.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert (stats.num_stale_tokens, stats.num_tokens) == (1, 3)


def test_age_counts_from_the_oldest_version_of_a_trajectory() -> None:
    fresh = trajectories_to_batch([trajectory(0, [2], [3], version=6)])
    batch, _ = batch_from_arrow([_of_two_versions(), fresh])

    _, stats = mask_stale(batch, version=6, min_version=None)

    assert stats.max_age == 3
    assert stats.mean_age == 1.5
    assert stats.num_stale_tokens == 0


def test_parts_have_whole_groups_and_lose_nothing() -> None:
    batch, _ = batch_from_arrow(random_groups(num_groups=5, group_size=3))

    parts = split_groups(batch, 2)

    assert len(parts) == 2
    assert np.concatenate([part.tokens for part in parts]).tolist() == batch.tokens.tolist()
    assert not set(parts[0].group_ids.tolist()) & set(parts[1].group_ids.tolist())


def test_selection_keeps_every_column_aligned() -> None:
    batch, _ = batch_from_arrow(random_groups(num_groups=2, group_size=2))

    chosen = select(batch, np.asarray([3, 0]))

    start, end = batch.offsets[3], batch.offsets[4]
    assert chosen.tokens[: end - start].tolist() == batch.tokens[start:end].tolist()
    assert chosen.logprobs[: end - start].tolist() == batch.logprobs[start:end].tolist()
    assert chosen.rewards.tolist() == [batch.rewards[3], batch.rewards[0]]
