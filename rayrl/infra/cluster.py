"""Join the Ray cluster that this process was started in, or start a local one.

The choice is Ray's own and follows what the user set up: `RAY_ADDRESS` (set inside `ray job submit` and in hosted
workspaces), else the cluster of the last `ray start` on this machine, else a new local one. Clusters that other
processes started for themselves are never joined.
"""

import logging
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from rayrl.errors import PlacementError
from rayrl.utils.logger import get_logger

_LOG = get_logger("cluster")
_CONNECT_S = 10.0


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
        PlacementError: the cluster that is set up for this process does not answer, or a local one does not start.
    """
    if ray.is_initialized():
        return _info(started=False)
    if log_to_driver and not (sys.stdout.isatty() and sys.stderr.isatty()):
        # Ray colours the lines of workers also in files.
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    address = _address_to_join()
    if address is None:
        num_cpus = max(os.cpu_count() or 1, math.ceil(min_cpus))
        _LOG.info("starting Ray on this machine")
        try:
            with _without_remark_on_signals():
                ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=log_to_driver)
        except Exception as error:
            # Ray raises a bare Exception where its own processes do not come up in time.
            raise PlacementError(
                f"a local Ray did not start: {error}; usually the machine is overloaded or short of memory or of space "
                "below /tmp: free some and try again, or join a cluster with RAY_ADDRESS=host:port"
            ) from error
    else:
        try:
            with _without_remark_on_signals():
                ray.init(address=address, log_to_driver=log_to_driver)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PlacementError(
                f"cannot join the Ray cluster at {address}: {error}; set RAY_ADDRESS to host:port of one that runs, or "
                "unset it for a local cluster"
            ) from error
    info = _info(started=address is None)
    _LOG.info("%s Ray at %s", "started" if info.started else "joined", info.address)
    return info


def would_join() -> bool:
    """Return whether `join_cluster` would join a cluster that is there, rather than start a local one.

    One that `RAY_ADDRESS` names is not asked whether it is there.
    """
    if ray.is_initialized():
        return True
    address, is_chosen = _known_address()
    return address is not None and (is_chosen or _answers(address))


def leave_cluster(info: ClusterInfo) -> None:
    """Shut down the cluster if `join_cluster` started it; otherwise leave it and the connection as they are."""
    if info.started and ray.is_initialized():
        ray.shutdown()


@contextmanager
def _without_remark_on_signals() -> Iterator[None]:
    """Keep back Ray's remark that it sets no handler of SIGTERM in this thread: whoever joins has its own."""
    logger = logging.getLogger("ray._private.worker")

    def is_other(record: logging.LogRecord) -> bool:
        return "SIGTERM handler is not set" not in str(record.msg)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _address_to_join() -> str | None:
    """Return the address that the surroundings name, if it answers; None for a local cluster."""
    address, is_chosen = _known_address()
    if address is None or _answers(address):
        return address
    if is_chosen:
        raise PlacementError(
            f"the Ray cluster at RAY_ADDRESS={address} does not answer within {_CONNECT_S:g} s; start it there, set "
            f"RAY_ADDRESS to one that runs, or unset RAY_ADDRESS for a local cluster"
        )
    _LOG.warning("the last `ray start` on this machine, at %s, is gone: starting a local Ray", address)
    return None


def _known_address() -> tuple[str | None, bool]:
    """Return the address of `RAY_ADDRESS` or else of the last `ray start`, and whether it is the former.

    None for a local cluster. Nobody was asked whether it answers.
    """
    # Not public; Ray offers it only as part of `ray.init`, which waits for minutes on a dead address. ray 2.55 to 2.60.
    from ray._private.services import find_bootstrap_address

    chosen = os.environ.get("RAY_ADDRESS")
    if chosen:
        return (None if chosen == "local" else chosen), True
    return find_bootstrap_address(None), False


def _answers(address: str) -> bool:
    """Return True if something listens at `host:port`; other forms, such as `auto`, are left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _info(*, started: bool) -> ClusterInfo:
    context = ray.get_runtime_context()
    return ClusterInfo(started=started, address=context.gcs_address, host=ray.util.get_node_ip_address())
