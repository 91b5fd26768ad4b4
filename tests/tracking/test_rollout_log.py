"""The rollout log: what was trained on, as Parquet."""

from pathlib import Path

import pyarrow as pa
import pytest

from rayrl.tracking.rollout_log import read_rollouts, rollout_path, write_rollouts
from rayrl.types.arrow import TRAJECTORY_SCHEMA, batch_to_trajectories, trajectories_to_batch
from rayrl.types.prompt import PromptId
from rayrl.types.trajectory import Trajectory, VersionSpan


def trajectory(ordinal: int, sample_index: int = 0) -> Trajectory:
    return Trajectory(
        prompt_id=PromptId(dataset="sums", epoch=0, ordinal=ordinal),
        sample_index=sample_index,
        tokens=(3, 4, 9),
        loss_mask=(0, 0, 1),
        logprobs=(0.0, 0.0, -0.5),
        spans=(VersionSpan(start=2, end=3, version=5),),
        reward=1.0,
        stop_reason="stop",
    )


def test_step_is_read_back_as_written_in_order(tmp_path: Path) -> None:
    groups = [[trajectory(2, 0), trajectory(2, 1)], [trajectory(1)]]

    path = write_rollouts(rollout_path(tmp_path / "rollouts", 12), [trajectories_to_batch(group) for group in groups])

    assert path == tmp_path / "rollouts" / "step_000012.parquet"
    assert batch_to_trajectories(read_rollouts(path)) == [*groups[0], *groups[1]]


def test_tables_are_taken_as_well_as_batches(tmp_path: Path) -> None:
    table = pa.Table.from_batches([trajectories_to_batch([trajectory(1)])])

    write_rollouts(tmp_path / "a.parquet", [table])

    assert read_rollouts(tmp_path / "a.parquet").num_rows == 1


def test_step_without_trajectories_is_an_empty_file_of_the_same_schema(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.parquet", [])

    assert read_rollouts(tmp_path / "a.parquet").schema.equals(TRAJECTORY_SCHEMA)


def test_step_done_again_replaces_the_earlier_file(tmp_path: Path) -> None:
    for ordinal in (1, 2):
        write_rollouts(tmp_path / "a.parquet", [trajectories_to_batch([trajectory(ordinal)])])

    [row] = batch_to_trajectories(read_rollouts(tmp_path / "a.parquet"))
    assert row.prompt_id.ordinal == 2


def test_failed_write_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.parquet", [trajectories_to_batch([trajectory(1)])])

    with pytest.raises(ValueError, match="schema"):
        write_rollouts(tmp_path / "a.parquet", [trajectories_to_batch([trajectory(2)]), pa.table({"other": [1]})])

    assert [item.name for item in tmp_path.iterdir()] == ["a.parquet"]
    assert read_rollouts(tmp_path / "a.parquet")["prompt_id"].to_pylist() == ["sums/0/1"]
