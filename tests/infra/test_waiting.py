"""Waits without a cluster: awaitables, deadlines, and which of several failures is reported."""

import asyncio
import re

import pytest
from ray.exceptions import ActorDiedError

from rayrl.errors import ActorError, DeadlineExceeded, TransferError
from rayrl.infra.identity import ActorLabel
from rayrl.infra.waiting import wait_for, wait_for_all

_LABEL = ActorLabel(name="inference-1", host="10.0.0.4", pid=4711)


async def _value(value: int) -> int:
    return value


async def _failure(error: Exception) -> None:
    raise error


async def _never() -> None:
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_results_come_in_the_order_of_the_calls() -> None:
    assert await wait_for_all([_value(1), _value(2)], seconds=10, phase="p", actors=["a", "b"]) == [1, 2]


@pytest.mark.asyncio
async def test_deadline_names_phase_actor_node_and_time_when_it_expires() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        await wait_for(_never(), seconds=0.01, phase="publication of version 3: transfer", actor=_LABEL, what="load()")

    message = str(caught.value)
    who = "inference-1 (node 10.0.0.4, pid 4711)"
    assert message.startswith(f"publication of version 3: transfer: waited 0.01 s for load() from {who}, since ")
    assert re.search(r"since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ;", message)
    assert "its stderr cannot be shown: " in message


@pytest.mark.asyncio
async def test_deadline_names_those_that_did_not_answer_when_some_did() -> None:
    with pytest.raises(DeadlineExceeded, match=r"2 of 3 did not answer: b, c"):
        await wait_for_all([_value(1), _never(), _never()], seconds=0.01, phase="p", actors=["a", "b", "c"])


@pytest.mark.asyncio
async def test_first_failure_ends_the_wait_when_others_never_answer() -> None:
    with pytest.raises(TransferError, match="lost"):
        await wait_for_all([_never(), _failure(TransferError("lost"))], seconds=600, phase="p", actors=["a", "b"])


@pytest.mark.asyncio
async def test_death_is_reported_when_others_fail_because_of_it() -> None:
    calls = [_failure(TransferError("connection closed")), _failure(ActorDiedError())]

    with pytest.raises(ActorError, match="p: b died"):
        await wait_for_all(calls, seconds=10, phase="p", actors=["a", "b"])


@pytest.mark.asyncio
async def test_awaitable_is_cancelled_when_the_deadline_expires() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(DeadlineExceeded):
        await wait_for(work(), seconds=0.01, phase="p", actor="a")

    await asyncio.wait_for(cancelled.wait(), 10)
    assert cancelled.is_set()


@pytest.mark.asyncio
async def test_awaitable_is_cancelled_when_the_caller_is() -> None:
    inner = asyncio.ensure_future(_never())
    outer = asyncio.ensure_future(wait_for(inner, seconds=600, phase="p", actor="a"))
    await asyncio.sleep(0)

    outer.cancel()

    with pytest.raises(asyncio.CancelledError):
        await outer
    with pytest.raises(asyncio.CancelledError):
        await inner


@pytest.mark.asyncio
async def test_wait_is_refused_when_there_is_nothing_to_await() -> None:
    with pytest.raises(TypeError, match="cannot wait for int"):
        await wait_for(3, seconds=1, phase="p", actor="a")
