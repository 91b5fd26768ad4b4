"""A file of the rollout log reduced to counts."""

import dataclasses

import pyarrow as pa

from rayrl.audit.step_rollouts import reduce_step
from rayrl.checkpoint.group_digest import group_digest
from rayrl.types.arrow import TRAJECTORY_SCHEMA, trajectories_to_batch
from rayrl.types.prompt import PromptId
from rayrl.types.trajectory import FailureRecord, Trajectory, VersionSpan

GOOD = Trajectory(
    prompt_id=PromptId(dataset="sums", epoch=0, ordinal=3),
    sample_index=0,
    tokens=(3, 11, 4, 12, 7, 1),
    loss_mask=(0, 0, 0, 1, 1, 1),
    logprobs=(0.0, 0.0, 0.0, -0.3, -0.1, -0.2),
    spans=(VersionSpan(start=3, end=4, version=4), VersionSpan(start=4, end=6, version=5)),
    reward=1.0,
    stop_reason="stop",
)
CUT = dataclasses.replace(
    GOOD, sample_index=1, spans=(VersionSpan(start=3, end=6, version=5),), stop_reason="length", reward=0.0
)
FAILED = Trajectory(
    prompt_id=GOOD.prompt_id,
    sample_index=2,
    tokens=(),
    loss_mask=(),
    logprobs=(),
    spans=(),
    reward=None,
    stop_reason="error",
    failure=FailureRecord(kind="reward", message="no"),
)


def test_tokens_are_counted_by_version_and_failures_carry_none() -> None:
    found = reduce_step(pa.Table.from_batches([trajectories_to_batch([GOOD, CUT, FAILED])]))

    assert (found.prompts, found.num_usable) == ({"sums/0/3": 3}, 2)
    assert found.tokens_by_version == {4: 1, 5: 5}
    assert found.truncated_by_version == {5: 3}
    assert found.oldest == (4, 5)
    assert found.versions_per_trajectory == {1: 1, 2: 1}
    assert found.faults == ()


def test_version_on_a_token_that_was_not_sampled_is_a_fault() -> None:
    columns = trajectories_to_batch([GOOD]).to_pydict()
    columns["versions"] = [[-1, -1, 4, 4, 5, 5]]

    found = reduce_step(pa.Table.from_pydict(columns, schema=TRAJECTORY_SCHEMA))

    assert found.faults == ("trajectory 0 of sums/0/3: versions do not cover exactly the sampled tokens",)


def test_empty_step_has_no_counts() -> None:
    found = reduce_step(pa.Table.from_batches([], schema=TRAJECTORY_SCHEMA))
    assert (found.num_usable, found.tokens_by_version, found.oldest) == (0, {}, ())


def test_digest_is_the_same_however_rows_are_cut_and_another_for_any_other_value() -> None:
    whole = trajectories_to_batch([GOOD, CUT, FAILED])
    parts = [trajectories_to_batch([GOOD]), whole.slice(1, 2)]
    other = trajectories_to_batch([dataclasses.replace(GOOD, logprobs=(0.0, 0.0, 0.0, -0.3, -0.1, -0.25)), CUT, FAILED])

    assert group_digest([whole]) == group_digest(parts) == group_digest([pa.Table.from_batches(parts)])
    assert group_digest([other]) != group_digest([whole])
