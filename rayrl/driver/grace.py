"""The time between a signal to stop and the end: a preempted machine goes away whether the run is ready or not."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rayrl.driver.stop_signal import StopSignal

T = TypeVar("T")


async def within_grace(
    work: Coroutine[Any, Any, T], stop: StopSignal, grace_s: float | None, leave: Callable[[], T]
) -> T:
    """Return what `work` returns, or, if it has not ended `grace_s` after a stop was asked for, what `leave` returns.

    `work` is cancelled, and waited for, before `leave` is called. Without `grace_s` it has all the time it needs.
    """
    main = asyncio.create_task(work)
    expiry = asyncio.create_task(_expire(stop, grace_s))
    try:
        await asyncio.wait({main, expiry}, return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            return await main
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)
        return leave()
    finally:
        for task in (main, expiry):
            task.cancel()
        await asyncio.gather(main, expiry, return_exceptions=True)


async def _expire(stop: StopSignal, grace_s: float | None) -> None:
    await stop.wait()
    if grace_s is None:
        await asyncio.get_running_loop().create_future()
    else:
        await asyncio.sleep(grace_s)
