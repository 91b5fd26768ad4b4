"""Deterministic mode: a run that is killed again and again ends with the bits and the ledger of one that is not."""

import random
import signal
from pathlib import Path

import pytest
import ray
from driver_runs import DriverProcess, check_audit, check_same, deterministic_config, ledger_position

from rayrl import Run, RunConfig
from rayrl.cli.exit_code import ExitCode

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(900), pytest.mark.usefixtures("ray_cluster")]

STEPS_PER_POINT = 3
FIRST_POINT, LAST_POINT = 2, 6
"""Transactions of the ledger from the start of a driver to its end; a step has one, the start three."""


def run_to_the_end(config: RunConfig) -> None:
    assert Run(config, resume="auto").train().status == "done"


def run_with_kills(config: RunConfig, address: str, points: list[int]) -> int:
    """End the driver at each number of ledger transactions, counted from its start; return how often it was ended.

    Every second end is a SIGTERM: the run saves, and leaves with the exit code of a stopped one.
    """
    killed = 0
    for index, point in enumerate(points):
        number = signal.SIGTERM if index % 2 else signal.SIGKILL
        before = ledger_position(config.run_dir)
        driver = DriverProcess(config, address)
        try:
            if driver.kill_when(lambda target=before + point: ledger_position(config.run_dir) >= target, number):
                killed += 1
                assert driver.wait() == (ExitCode.STOPPED if number == signal.SIGTERM else -number), driver.output
        finally:
            driver.close()
    run_to_the_end(config)
    return killed


@pytest.mark.parametrize("num_points", [2, pytest.param(10, marks=pytest.mark.slow)], ids=["two_points", "ten_points"])
def test_killed_and_resumed_run_ends_with_the_same_bits_and_ledger(
    small_model: Path, tmp_path: Path, num_points: int
) -> None:
    address = ray.get_runtime_context().gcs_address
    rng = random.Random(num_points + 1)
    points = [rng.randint(FIRST_POINT, LAST_POINT) for _ in range(num_points)]
    num_steps = STEPS_PER_POINT * num_points
    # Starting actors is what this costs: with many points one rollout worker must do.
    size = {"rollout__num_workers": 2 if num_points == 2 else 1}
    undisturbed = deterministic_config(small_model, tmp_path / "a", "undisturbed", num_steps, **size)
    killed = deterministic_config(small_model, tmp_path / "b", "killed", num_steps, **size)

    run_to_the_end(undisturbed)
    num_killed = run_with_kills(killed, address, points)

    assert num_killed == num_points, "all of them come while the run goes on"
    check_same(undisturbed, killed)
    check_audit(killed.run_dir)
