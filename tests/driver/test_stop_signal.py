"""What a signal does to a run, before and after its first step."""

import asyncio
import os
import signal

import pytest

from rayrl.driver.stop_signal import StopSignal


async def waiting(stop: StopSignal, *, begun: bool, signals: int) -> str | None:
    """Send SIGTERM to this process `signals` times while a run waits; return why it stops."""
    stop.install()
    try:
        if begun:
            stop.begin()
        for _ in range(signals - 1):
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await (stop.wait() if stop.reason is None else asyncio.Event().wait())
        return stop.reason
    finally:
        stop.uninstall()


@pytest.mark.asyncio
async def test_first_signal_asks_for_a_stop_when_the_run_has_begun() -> None:
    assert await asyncio.create_task(waiting(StopSignal(), begun=True, signals=1)) == "SIGTERM"


@pytest.mark.asyncio
@pytest.mark.parametrize(("begun", "signals"), [(False, 1), (True, 2)])
async def test_run_is_cancelled_when_nothing_has_begun_or_a_second_signal_comes(begun: bool, signals: int) -> None:
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(waiting(StopSignal(), begun=begun, signals=signals))
