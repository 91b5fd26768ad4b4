"""Join Ray beside the event loop, so that a signal meanwhile is heard at once."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rayrl.driver.stop_signal import StopSignal
from rayrl.infra.cluster import ClusterInfo, join_cluster, leave_cluster
from rayrl.utils.daemon_thread import call_in_thread


@asynccontextmanager
async def joined_cluster(min_cpus: float, stop: StopSignal) -> AsyncIterator[ClusterInfo]:
    """Run the body on the cluster of this process, with signals going to `stop` from the first moment on."""
    stop.install()
    try:
        cluster = await join_beside(min_cpus)
        try:
            # Ray may have set handlers of its own.
            stop.install()
            yield cluster
        finally:
            stop.uninstall()
            await asyncio.to_thread(leave_cluster, cluster)
    finally:
        stop.uninstall()


async def join_beside(min_cpus: float) -> ClusterInfo:
    """As `join_cluster`. A caller that is cancelled need not wait for Ray, which may take a minute to come up: a local
    cluster that is there after all is shut down again, by its thread or by the end of this process."""
    abandoned = threading.Event()

    def join() -> ClusterInfo:
        info = join_cluster(min_cpus)
        if abandoned.is_set():
            leave_cluster(info)
        return info

    try:
        return await call_in_thread(join)
    except asyncio.CancelledError:
        abandoned.set()
        raise
