"""The cause that a stall report names, for each thing that can hold a run up."""

from typing import Any

import pytest

from rayrl.driver.stall_report import StallObservation, name_cause, report_text
from rayrl.inference.engine import EngineStatus
from rayrl.inference.lifecycle import EngineState
from rayrl.infra.collective_record import CollectiveRecord, first_divergence
from rayrl.infra.collective_report import CollectiveReport
from rayrl.rollout.episode_board import EpisodeState


def engine(**changes: Any) -> EngineStatus:
    values: dict[str, Any] = {
        "state": EngineState.RUNNING,
        "version": 3,
        "num_running": 2,
        "num_waiting": 0,
        "kv_use": 0.1,
        "total_requests": 9,
        "total_tokens": 90,
        "total_prefill_tokens": 9,
        "total_steps": 50,
        "failure": None,
        **changes,
    }
    return EngineStatus(**values)


def episode(stage: Any, stage_s: float = 40.0) -> EpisodeState:
    return EpisodeState(episode="sums/0/3#1", stage=stage, stage_s=stage_s, episode_s=50.0, calls=2)


def seen(**changes: Any) -> StallObservation:
    values: dict[str, Any] = {
        "step": 4,
        "stalled_s": 60.0,
        "phase": "waiting for 4 groups",
        "phase_s": 58.0,
        "needed": 4,
        "buffered": 1,
        "rollout": {"in_flight": 3},
        "engines": {"inference-0": engine()},
        "queue_limit": 8,
        "workers": {"rollout-0": {"oldest_episodes": (episode("sampling", 5.0),)}},
        "collectives": None,
        "stacks": {"train-0": 'File "x.py", line 7 in f'},
        **changes,
    }
    return StallObservation(**values)


def call(operation: str) -> CollectiveRecord:
    return CollectiveRecord(
        group="data", sequence=812, operation=operation, shape="[4]", dtype="float32", reduction="", place="x.py:1"
    )


DIVERGED = CollectiveReport(
    last={"train-0": call("all_gather")},
    divergence=first_divergence(
        {"train-0": [call("all_gather")], "train-1": [call("all_reduce")], "train-2": [call("all_gather")]}
    ),
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"phase": "training step 5", "collectives": DIVERGED},
            "train-1 calls all_reduce #812 on data where the others call all_gather",
        ),
        ({"phase": "training step 5"}, "training step 5 goes on for 58 s; debug.collectives: record would tell"),
        ({"engines": {"inference-0": "waited 5 s for status()"}}, "engine does not answer: inference-0: waited 5 s"),
        (
            {"engines": {"inference-0": engine(state=EngineState.PAUSED, num_waiting=3)}},
            "engine inference-0 is paused with 2 running and 3 waiting requests",
        ),
        ({"engines": {"inference-0": engine(failure="OSError: gone")}}, "engine inference-0 has failed: OSError"),
        ({"engines": {"inference-0": engine(num_waiting=8)}}, "the queue of engine inference-0 is full: 8 requests"),
        ({"workers": {"rollout-0": "died"}}, "rollout worker does not answer: rollout-0: died"),
        (
            {"workers": {"rollout-0": {"oldest_episodes": (episode("sampling", 5.0), episode("scoring"))}}},
            "the reward does not return: episode sums/0/3#1 is in scoring for 40 s",
        ),
        (
            {"workers": {"rollout-0": {"oldest_episodes": (episode("workflow"),)}}},
            "the workflow does not return: episode sums/0/3#1 is in workflow for 40 s",
        ),
        ({}, "sampling does not end: episode sums/0/3#1 is in sampling for 5 s"),
        ({"workers": {"rollout-0": {"oldest_episodes": ()}}}, "no episode runs and 1 of 4 groups are there"),
    ],
)
def test_cause_is_named_when_no_step_comes(changes: dict[str, Any], words: str) -> None:
    assert words in name_cause(seen(**changes))


def test_report_has_the_cause_every_state_and_the_stacks() -> None:
    text = report_text(seen(), "because")
    for words in (
        "cause: because",
        "train loop: waiting for 4 groups",
        "engine inference-0",
        "worker rollout-0",
        "x.py",
    ):
        assert words in text
