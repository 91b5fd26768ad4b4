"""Concurrent calls become few batches; a failure reaches its own callers only."""

import asyncio
from collections.abc import Sequence

import pytest

from rayrl.utils.batched_calls import BatchedCalls

pytestmark = pytest.mark.asyncio


async def test_calls_that_arrive_while_a_batch_runs_go_together_into_the_next() -> None:
    batches: list[list[int]] = []
    started, release = asyncio.Event(), asyncio.Event()

    async def run(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        started.set()
        await release.wait()
        return [10 * item for item in items]

    calls = BatchedCalls[int, int](run, 3)
    first = asyncio.ensure_future(calls.call(0))
    await started.wait()
    later = [asyncio.ensure_future(calls.call(item)) for item in range(1, 6)]
    # Behind the calls in the loop's queue.
    asyncio.get_running_loop().call_soon(release.set)

    assert await asyncio.gather(first, *later) == [0, 10, 20, 30, 40, 50]
    assert batches == [[0], [1, 2, 3], [4, 5]]


async def test_a_batch_that_fails_fails_its_callers_and_no_later_ones() -> None:
    async def run(items: Sequence[int]) -> list[int]:
        if 1 in items:
            raise ValueError("no ones")
        return list(items)

    calls = BatchedCalls[int, int](run, 1)

    results = await asyncio.gather(calls.call(1), calls.call(2), return_exceptions=True)

    assert isinstance(results[0], ValueError)
    assert results[1] == 2


async def test_a_caller_that_left_does_not_hold_up_the_others() -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def run(items: Sequence[int]) -> list[int]:
        started.set()
        await release.wait()
        return list(items)

    calls = BatchedCalls[int, int](run, 4)
    leaving, staying = asyncio.ensure_future(calls.call(1)), asyncio.ensure_future(calls.call(2))
    await started.wait()
    leaving.cancel()
    release.set()

    assert await staying == 2
