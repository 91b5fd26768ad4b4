"""The time between a signal and the end, without waiting for it: what is over is over, what is not is left."""

import asyncio

import pytest

from rayrl.driver.grace import within_grace
from rayrl.driver.stop_signal import StopSignal

pytestmark = pytest.mark.asyncio


async def forever(ended: list[str]) -> str:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        ended.append("cancelled")
    return "never"


async def test_work_is_cancelled_before_the_run_leaves_when_the_grace_is_over() -> None:
    stop, ended = StopSignal(), list[str]()
    stop.request("SIGTERM")

    def leave() -> str:
        ended.append("left")
        return "stopped"

    assert await within_grace(forever(ended), stop, 1e-6, leave) == "stopped"
    assert ended == ["cancelled", "left"]


async def test_work_that_ends_within_the_grace_gives_its_result() -> None:
    stop = StopSignal()
    stop.request("SIGTERM")
    assert await within_grace(asyncio.sleep(0, "saved"), stop, 3600.0, lambda: "left") == "saved"


async def test_work_has_all_the_time_without_a_signal_or_without_a_limit() -> None:
    quiet, told = StopSignal(), StopSignal()
    told.request("SIGTERM")
    assert await within_grace(asyncio.sleep(0, "done"), quiet, 1e-9, lambda: "left") == "done"
    assert await within_grace(asyncio.sleep(0, "done"), told, None, lambda: "left") == "done"


async def test_failure_of_the_work_is_raised() -> None:
    async def fail() -> str:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        await within_grace(fail(), StopSignal(), 1.0, lambda: "left")


async def test_second_signal_cancels_the_work_and_is_waited_for() -> None:
    ended: list[str] = []
    task = asyncio.create_task(within_grace(forever(ended), StopSignal(), None, lambda: "left"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"]
