"""A run on a cluster of four nodes loses the node of an engine; started by a test as a process of its own.

python node_death.py MODEL_DIR ROOT
"""

import json
import sys
from pathlib import Path

import ray
from engine_runs import LiveRun, events, run_config
from ray.cluster_utils import Cluster


def parent_of(pid: int) -> int:
    """Return the process that started another one: the raylet of its node, for an actor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def kill_raylet(cluster: Cluster, pid: int) -> None:
    """Kill the raylet and reap it: its workers take one that is merely not waited for as alive, and stay."""
    raylets = [item.process for node in cluster.list_all_nodes() for item in node.all_processes.get("raylet", [])]
    (raylet,) = [process for process in raylets if process.pid == pid]
    raylet.kill()
    raylet.wait()


def main(model: Path, root: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        # Training needs two CPUs and fits on the head only; two of the other nodes hold an engine each, one is spare.
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        live = LiveRun(run_config(model, root, training__cpus_per_worker=2))
        live.until_step(1)
        kill_raylet(cluster, parent_of(live.members("inference")["inference-0"]))
        live.until_replaced("inference", 1)
        live.more_steps(2)
        result = live.finish()
        lost = [json.loads(text) for text in events(result.run_dir, "engine_lost")]
        assert lost[0]["engine"] == "inference-0", lost
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
