"""One seeded run on a cluster of several nodes that loses nodes, too; started by a test as a process of its own.

python node_seeds.py MODEL_DIR ROOT SEED
"""

import random
import sys
from pathlib import Path

from driver_runs import small_config
from node_death import kill_raylet, parent_of
from ray.cluster_utils import Cluster
from seeded_runs import run_through

NUM_STEPS = 10
MOST_ENDS = 6
NUM_NODES = 3
"""Beside the head: one for each engine and a spare one."""


def main(model: Path, root: Path, seed: int) -> None:
    rng = random.Random(seed)
    config = small_config(
        model,
        root,
        f"seed-{seed}",
        run__seed=seed,
        driver__num_steps=NUM_STEPS,
        driver__max_staleness=rng.randint(0, 3),
        # Training needs two CPUs, and fits on the head only: its node stays.
        training__cpus_per_worker=2,
        inference__num_engines=2,
        rollout__num_workers=1,
        checkpoint__every=rng.randint(1, 4),
        supervision__backoff_s=0.1,
        supervision__silence_s=30,
        driver__deadlines={"start_s": 120, "publication_s": 60, "shutdown_s": 10},
    )
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        for _ in range(NUM_NODES):
            cluster.add_node(num_cpus=1)

        def kill_node(pid: int) -> bool:
            try:
                kill_raylet(cluster, parent_of(pid))
            except (OSError, ValueError):
                return False
            cluster.add_node(num_cpus=1)
            return True

        fates = ("raylet", "raylet", "raylet", "driver", "signal", "train", "inference", "rollout")
        befell = run_through(config, cluster.address, rng, fates, MOST_ENDS, kill_node)
        if "raylet" not in befell:
            raise AssertionError(f"no node was lost: {befell}")
    finally:
        cluster.shutdown()
    sys.stdout.write(f"befell: {', '.join(befell)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
