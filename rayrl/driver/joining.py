"""Join Ray beside the event loop, so that a signal meanwhile is heard at once."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager

from rayrl.driver.stop_signal import StopSignal
from rayrl.infra.cluster import ClusterInfo, join_cluster, leave_cluster


@asynccontextmanager
async def joined_cluster(min_cpus: float, stop: StopSignal) -> AsyncIterator[ClusterInfo]:
    """Run the body on the cluster of this process, with signals going to `stop` from the first moment on.

    A caller that is cancelled need not wait for Ray, which may take a minute to come up: a local cluster that is there
    after all is shut down again, by its thread or by the end of this process.
    """
    stop.install()
    try:
        keeper = _ClusterKeeper(min_cpus)
        try:
            cluster = await asyncio.wrap_future(keeper.joined)
            # Ray may have set handlers of its own.
            stop.install()
            yield cluster
        except asyncio.CancelledError:
            keeper.release()
            raise
        finally:
            stop.uninstall()
            if keeper.joined.done():
                keeper.release()
                await asyncio.wrap_future(keeper.left)
    finally:
        stop.uninstall()


class _ClusterKeeper:
    """A thread that joins Ray and stays until Ray is to be left.

    It must not end before: the processes of a local Ray ask the kernel to kill them when the thread that started them
    ends, whatever becomes of the process.
    """

    def __init__(self, min_cpus: float) -> None:
        self.joined: Future[ClusterInfo] = Future()
        self.left: Future[None] = Future()
        self._min_cpus = min_cpus
        self._is_released = threading.Event()
        for future in (self.joined, self.left):
            # From now on no waiter that is cancelled can cancel it.
            future.set_running_or_notify_cancel()
        threading.Thread(target=self._run, name="rayrl-ray", daemon=True).start()

    def release(self) -> None:
        """Leave Ray once it is joined."""
        self._is_released.set()

    def _run(self) -> None:
        try:
            info = join_cluster(self._min_cpus)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self.left.set_result(None)
            self.joined.set_exception(error)
            return
        self.joined.set_result(info)
        self._is_released.wait()
        try:
            leave_cluster(info)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self.left.set_exception(error)
        else:
            self.left.set_result(None)
