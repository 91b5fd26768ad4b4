"""Run state and buffered groups come back as they were saved."""

import json
import pickle
from pathlib import Path

import pyarrow as pa
import pytest

from rayrl.checkpoint.run_state import RunState, read_groups, write_groups
from rayrl.errors import CheckpointError
from rayrl.types.arrow import batch_to_trajectories, trajectories_to_batch
from rayrl.types.prompt import PromptId
from rayrl.types.trajectory import FailureRecord, Trajectory, VersionSpan

STATE = RunState(
    step=10,
    version=10,
    dataset_state={"epoch": 1, "frontier": 160, "given_out": [161, 163]},
    buffered=3,
    ledger_position=11,
    consumed=160,
    config_digest="9f",
    run_id="4a",
    extra={"kl_coef": 0.1},
)


def group(ordinal: int, size: int) -> pa.RecordBatch:
    items = [
        Trajectory(
            prompt_id=PromptId(dataset="sums", epoch=0, ordinal=ordinal),
            sample_index=index,
            tokens=(3, 4, 9, 8),
            loss_mask=(0, 0, 1, 1),
            logprobs=(0.0, 0.0, -0.5, -0.25),
            spans=(VersionSpan(start=2, end=3, version=5), VersionSpan(start=3, end=4, version=6)),
            reward=None if index else 1.0,
            stop_reason="error" if index else "stop",
            failure=FailureRecord(kind="reward", message="ValueError: x", attempts=2) if index else None,
        )
        for index in range(size)
    ]
    return trajectories_to_batch(items)


def test_state_is_the_same_after_json_and_pickle() -> None:
    assert RunState.from_json(STATE.to_json()) == STATE
    assert pickle.loads(pickle.dumps(STATE)) == STATE


def test_state_that_json_cannot_hold_is_refused_when_it_is_written() -> None:
    data = {**json.loads(STATE.to_json()), "dataset_state": {"nan": float("nan")}}

    with pytest.raises(ValueError, match="Out of range float values"):
        RunState(**data).to_json()


def test_state_of_another_version_says_which_fields_differ() -> None:
    data = json.loads(STATE.to_json())
    del data["consumed"]
    data["mood"] = 1

    with pytest.raises(CheckpointError, match=r"lacks \['consumed'\] and has unknown \['mood'\]"):
        RunState.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_state_that_is_not_a_state_is_a_checkpoint_error(text: str) -> None:
    with pytest.raises(CheckpointError):
        RunState.from_json(text)


def test_groups_come_back_one_batch_each_in_order(tmp_path: Path) -> None:
    groups = [group(7, 2), group(3, 4), group(5, 1)]

    write_groups(tmp_path / "groups.arrow", groups)
    back = read_groups(tmp_path / "groups.arrow")

    assert [batch.num_rows for batch in back] == [2, 4, 1]
    assert [batch_to_trajectories(batch) for batch in back] == [batch_to_trajectories(batch) for batch in groups]


def test_no_groups_are_an_empty_list(tmp_path: Path) -> None:
    write_groups(tmp_path / "groups.arrow", [])

    assert read_groups(tmp_path / "groups.arrow") == []


def test_groups_outlive_the_checkpoint_they_were_read_from(tmp_path: Path) -> None:
    write_groups(tmp_path / "groups.arrow", [group(1, 2)])
    [batch] = read_groups(tmp_path / "groups.arrow")

    (tmp_path / "groups.arrow").write_bytes(b"")

    assert batch_to_trajectories(batch)[0].tokens == (3, 4, 9, 8)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_groups_cut_short_are_a_checkpoint_error(tmp_path: Path, share: float) -> None:
    path = tmp_path / "groups.arrow"
    write_groups(path, [group(1, 2)])
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    with pytest.raises(CheckpointError, match=r"cannot read buffered groups .*groups\.arrow"):
        read_groups(path)


def test_missing_groups_are_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read buffered groups"):
        read_groups(tmp_path / "groups.arrow")
