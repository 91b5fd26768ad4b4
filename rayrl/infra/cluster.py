"""Join the Ray cluster that this process was started in, or start a local one.

The choice is Ray's own and follows what the user set up: `RAY_ADDRESS` (set inside `ray job submit` and in hosted
workspaces), else the cluster of the last `ray start` on this machine, else a new local one. Clusters that other
processes started for themselves are never joined.
"""

import math
import os
from dataclasses import dataclass

import ray

from rayrl.errors import PlacementError
from rayrl.utils.logger import get_logger

_LOG = get_logger("cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """The cluster of this process.

    Example: `ClusterInfo(started=True, address="10.0.0.4:6379", host="10.0.0.4")`.
    """

    started: bool
    """True if this process started it; only then `leave_cluster` shuts it down."""
    address: str
    """Address of the cluster's control service."""
    host: str
    """IP address of this process's node, reachable from the other nodes."""


def join_cluster(min_cpus: float = 0, *, log_to_driver: bool = True) -> ClusterInfo:
    """Connect to Ray and say whether a local cluster had to be started for it.

    Args:
        min_cpus: logical CPUs that a local cluster gets at least; a cluster that is joined keeps its own.
        log_to_driver: repeat the lines of all workers on this process's streams.

    Raises:
        PlacementError: the cluster that is set up for this process does not answer.
    """
    if ray.is_initialized():
        return _info(started=False)
    num_cpus = max(os.cpu_count() or 1, math.ceil(min_cpus))
    try:
        started = _init(num_cpus, log_to_driver)
    except ConnectionError as error:
        where = os.environ.get("RAY_ADDRESS") or "the last `ray start` on this machine"
        raise PlacementError(
            f"cannot connect to the Ray cluster given by {where}: {error}; start it, or unset RAY_ADDRESS"
        ) from error
    info = _info(started=started)
    _LOG.info("%s Ray at %s", "started" if started else "joined", info.address)
    return info


def leave_cluster(info: ClusterInfo) -> None:
    """Shut down the cluster if `join_cluster` started it; otherwise leave it and the connection as they are."""
    if info.started and ray.is_initialized():
        ray.shutdown()


def _init(num_cpus: int, log_to_driver: bool) -> bool:
    """Return True if a local cluster was started, False if one was joined."""
    try:
        ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=log_to_driver)
    except ValueError as error:
        # Ray refuses sizes for a cluster that exists already: there is one to join. Nothing was started so far.
        if "existing cluster" not in str(error):
            raise
        ray.init(log_to_driver=log_to_driver)
        return False
    return True


def _info(*, started: bool) -> ClusterInfo:
    context = ray.get_runtime_context()
    return ClusterInfo(started=started, address=context.gcs_address, host=ray.util.get_node_ip_address())
