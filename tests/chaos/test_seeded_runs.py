"""Runs in which random processes die at random moments: driver, training workers, engines, rollout workers.

Each seed is one run, continued until it has all its steps; then its records must prove what it did. All seeds:
`pytest -m chaos tests/chaos/test_seeded_runs.py`; one of them: `... -k seed_7`.
"""

import os
import random
import signal
from pathlib import Path

import pytest
import ray
from driver_runs import DriverProcess, check_audit, ledger_position, outcomes, small_config

from rayrl.cli.exit_code import ExitCode

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(900), pytest.mark.usefixtures("ray_cluster")]

NUM_SEEDS = 30
NUM_STEPS = 10
MOST_DRIVERS = 8
"""Drivers that are ended before the last one is left to go on to the end."""


def seeded(seed: int) -> object:
    return pytest.param(seed, id=f"seed_{seed}", marks=[pytest.mark.slow] if seed else [])


def end_something(driver: DriverProcess, rng: random.Random) -> None:
    """Kill the driver, ask it to leave, or kill one of its actors."""
    fate = rng.choice(["driver", "signal", "train", "inference", "rollout", "train"])
    if fate == "driver":
        driver.process.kill()
    elif fate == "signal":
        driver.process.send_signal(signal.SIGTERM)
    else:
        alive = [
            pid for name, pid in driver.members().items() if name.startswith(fate) and Path(f"/proc/{pid}").exists()
        ]
        if alive:
            os.kill(rng.choice(alive), signal.SIGKILL)


@pytest.mark.parametrize("seed", [seeded(seed) for seed in range(NUM_SEEDS)])
def test_run_proves_what_it_did_when_random_processes_died(chaos_model: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config = small_config(
        chaos_model,
        tmp_path,
        f"seed-{seed}",
        run__seed=seed,
        driver__num_steps=NUM_STEPS,
        driver__max_staleness=rng.randint(0, 3),
        training__parallel__data=rng.randint(1, 2),
        inference__num_engines=2,
        checkpoint__every=rng.randint(1, 4),
        supervision__backoff_s=0.1,
        driver__deadlines={"start_s": 120, "publication_s": 60, "shutdown_s": 10},
    )
    address = ray.get_runtime_context().gcs_address
    ends = 0
    while True:
        before = ledger_position(config.run_dir)
        driver = DriverProcess(config, address)
        try:
            while ends < MOST_DRIVERS and driver.process.poll() is None:
                before += rng.randint(1, 10)
                if not driver.reaches(lambda target=before: ledger_position(config.run_dir) >= target):
                    break
                end_something(driver, rng)
                ends += 1
            code = driver.wait()
        finally:
            driver.close()
        assert code in (ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED, -signal.SIGKILL), driver.output
        if code == ExitCode.DONE:
            break
    trained = [item.outcome.prompt_id for item in outcomes(config.run_dir) if item.outcome.outcome == "trained"]
    assert len(trained) == len(set(trained)) == 4 * NUM_STEPS
    check_audit(config.run_dir)
