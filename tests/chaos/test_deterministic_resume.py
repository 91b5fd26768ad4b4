"""Deterministic mode: a run that is killed again and again ends with the bits and the ledger of one that is not."""

import random
from pathlib import Path

import pytest
import ray
from driver_runs import DriverProcess, check_audit, check_same, deterministic_config, ledger_position

from rayrl import Run, RunConfig

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.usefixtures("ray_cluster")]

NUM_STEPS = 6
TRANSACTIONS = 2 * NUM_STEPS
"""A step is two transactions: its publication and its outcomes."""


def run_to_the_end(config: RunConfig) -> None:
    assert Run(config, resume="auto").train().status == "done"


def run_with_kills(config: RunConfig, address: str, points: list[int]) -> int:
    """Kill the driver at each number of ledger transactions, counted from its start; return how often it died."""
    killed = 0
    for point in points:
        before = ledger_position(config.run_dir)
        driver = DriverProcess(config, address)
        try:
            killed += driver.kill_when(lambda target=before + point: ledger_position(config.run_dir) >= target)
        finally:
            driver.close()
    run_to_the_end(config)
    return killed


@pytest.mark.parametrize("num_points", [2, pytest.param(10, marks=pytest.mark.slow)], ids=["two_points", "ten_points"])
def test_killed_and_resumed_run_ends_with_the_same_bits_and_ledger(
    chaos_model: Path, tmp_path: Path, num_points: int
) -> None:
    address = ray.get_runtime_context().gcs_address
    rng = random.Random(num_points)
    points = [rng.randint(1, TRANSACTIONS // 2) for _ in range(num_points)]
    undisturbed = deterministic_config(chaos_model, tmp_path / "a", "undisturbed", NUM_STEPS)
    killed = deterministic_config(chaos_model, tmp_path / "b", "killed", NUM_STEPS)

    run_to_the_end(undisturbed)
    num_killed = run_with_kills(killed, address, points)

    assert num_killed >= num_points // 2, "the kills must come while the run goes on"
    check_same(undisturbed, killed)
    check_audit(killed.run_dir)
