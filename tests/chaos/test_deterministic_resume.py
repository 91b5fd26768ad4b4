"""Deterministic mode: a run that is killed again and again ends with the bits and the ledger of one that is not."""

import random
from pathlib import Path

import pytest
import ray
import torch
from driver_runs import DriverProcess, final_tensors, ledger_position, outcomes, small_config

from rayrl import Run, RunConfig

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.usefixtures("ray_cluster")]

NUM_STEPS = 6
TRANSACTIONS = 2 * NUM_STEPS
"""A step is two transactions: its publication and its outcomes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rayrl.models.tiny import create_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    return create_tiny_model(
        folder, alphabet="0123456789+=", hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_context=32
    )


def deterministic_config(model: Path, root: Path, name: str) -> RunConfig:
    return small_config(
        model,
        root,
        name,
        run__deterministic=True,
        driver__max_staleness=0,
        driver__num_steps=NUM_STEPS,
        inference__num_engines=2,
        checkpoint__every=2,
    )


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


def check_same(undisturbed: RunConfig, killed: RunConfig) -> None:
    expected, actual = final_tensors(undisturbed.run_dir), final_tensors(killed.run_dir)
    assert expected.keys() == actual.keys()
    different = [name for name, value in expected.items() if not torch.equal(value, actual[name])]
    assert different == []
    assert outcomes(killed.run_dir) == outcomes(undisturbed.run_dir)


@pytest.mark.parametrize("num_points", [2, pytest.param(10, marks=pytest.mark.slow)], ids=["two_points", "ten_points"])
def test_killed_and_resumed_run_ends_with_the_same_bits_and_ledger(
    model: Path, tmp_path: Path, num_points: int
) -> None:
    address = ray.get_runtime_context().gcs_address
    rng = random.Random(num_points)
    points = [rng.randint(1, TRANSACTIONS // 2) for _ in range(num_points)]
    undisturbed = deterministic_config(model, tmp_path / "a", "undisturbed")
    killed = deterministic_config(model, tmp_path / "b", "killed")

    run_to_the_end(undisturbed)
    num_killed = run_with_kills(killed, address, points)

    assert num_killed >= num_points // 2, "the kills must come while the run goes on"
    check_same(undisturbed, killed)
