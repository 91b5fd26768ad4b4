"""Training workers that die: the group is rebuilt, engines stay, and nothing is trained twice or left out."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from driver_runs import check_audit, check_same, deterministic_config, outcomes, small_config
from engine_runs import events

from rayrl import Run, RunConfig
from rayrl.driver.result import RunResult
from rayrl.driver.run_handle import RunHandle
from rayrl.errors import BudgetExhausted

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(900), pytest.mark.usefixtures("ray_cluster")]

NUM_STEPS = 8


def status_at(handle: RunHandle, step: int) -> dict[str, Any]:
    """Return the status once the run has made `step` steps."""
    pause = threading.Event()
    while True:
        status = handle.status()
        if status["phase"] in ("failed", "done"):
            handle.wait()
            raise AssertionError(f"the run ended before step {step}")
        if status.get("step", -1) >= step and "training" in status:
            return status
        pause.wait(0.01)


def run_and_kill(config: RunConfig, *kills: tuple[int, str]) -> tuple[RunResult, list[dict[str, Any]]]:
    """Kill members of the training group once so many steps are made; return the result and all statuses."""
    handle = Run(config).start()
    statuses = []
    for step, name in kills:
        statuses.append(status_at(handle, step))
        os.kill(statuses[-1]["training"][name], signal.SIGKILL)
        pause = threading.Event()
        while handle.status().get("training", {}).get(name) == statuses[-1]["training"][name]:
            assert handle.status()["phase"] not in ("failed", "done"), handle.wait()
            pause.wait(0.01)
    return handle.wait(timeout_s=240), statuses


def rebuilds(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in events(run_dir, "training_rebuilt")]


def test_run_ends_with_the_same_bits_when_a_training_worker_is_killed(small_model: Path, tmp_path: Path) -> None:
    options = {"training__parallel__data": 2}
    undisturbed = deterministic_config(small_model, tmp_path / "a", "undisturbed", NUM_STEPS, **options)
    killed = deterministic_config(small_model, tmp_path / "b", "killed", NUM_STEPS, **options)

    Run(undisturbed).train()
    # The first dies before there is a checkpoint or right after: from the initial model, or from step 2.
    result, (first, second) = run_and_kill(killed, (1, "train-1"), (5, "train-0"))

    assert (result.status, result.steps) == ("done", NUM_STEPS)
    check_same(undisturbed, killed)
    check_audit(killed.run_dir)
    assert len(rebuilds(killed.run_dir)) == result.metrics["supervision/train_rebuilt"] == 2
    assert first["supervision"]["inference"]["members"] == second["supervision"]["inference"]["members"], "they stay up"


@pytest.mark.slow
def test_run_is_whole_when_training_workers_die_before_the_first_step(small_model: Path, tmp_path: Path) -> None:
    config = small_config(small_model, tmp_path, "killed", driver__num_steps=2, training__parallel__data=2)
    # Right after all actors are ready: in the restore, the rendezvous or the first publication, and in its repetition.
    result, _ = run_and_kill(config, (0, "train-0"), (0, "train-1"))
    assert (result.status, result.steps) == ("done", 2)
    check_audit(config.run_dir)
    assert len(outcomes(config.run_dir)) == 8


@pytest.mark.slow
def test_groups_of_versions_that_are_gone_are_sampled_again_and_counted(small_model: Path, tmp_path: Path) -> None:
    config = small_config(
        small_model, tmp_path, "killed", driver__num_steps=NUM_STEPS, driver__max_staleness=3, checkpoint__every=4
    )
    result, _ = run_and_kill(config, (3, "train-0"), (6, "train-0"))

    assert result.status == "done"
    check_audit(result.run_dir)
    trained = [item.outcome.prompt_id for item in outcomes(result.run_dir)]
    assert len(trained) == len(set(trained)) == 4 * NUM_STEPS
    undone = [(event["from_step"], event["to_version"]) for event in rebuilds(result.run_dir)]
    assert all(version % 4 == 0 and step >= version for step, version in undone)
    lost = sum(event["groups_in_flight"] + len(event["groups_lost"]) for event in rebuilds(result.run_dir))
    assert result.metrics["supervision/train_groups_lost"] == lost


@pytest.mark.slow
def test_run_ends_with_the_cause_when_the_restarts_are_used_up(small_model: Path, tmp_path: Path) -> None:
    config = small_config(small_model, tmp_path, "killed", driver__num_steps=10_000, supervision__restarts=0)
    handle = Run(config).start()
    os.kill(status_at(handle, 1)["training"]["train-0"], signal.SIGKILL)
    with pytest.raises(BudgetExhausted, match=r"training group is lost.*supervision\.restarts=0"):
        handle.wait(timeout_s=120)
