"""One outcome per call: who failed, who died, who was silent. Calls are coroutines, as in the fakes of other tests."""

import asyncio
from typing import Any

import pytest

from rayrl.errors import DeadlineExceeded, TransferError
from rayrl.infra.identity import ActorLabel
from rayrl.infra.outcomes import CallState, PendingCall, gather_outcomes


def call(name: str, work: Any) -> PendingCall:
    return PendingCall(actor=ActorLabel(name=name), ref=work)


async def returns(value: int) -> int:
    return value


async def fails() -> None:
    raise TransferError("lost its peer")


async def hangs() -> None:
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_each_call_has_its_outcome_in_order() -> None:
    outcomes = await gather_outcomes(
        [call("a", returns(1)), call("b", fails()), call("c", returns(3))], seconds=30.0, grace_s=30.0, phase="p"
    )
    assert [item.member for item in outcomes] == ["a", "b", "c"]
    assert [item.state for item in outcomes] == [CallState.DONE, CallState.FAILED, CallState.DONE]
    assert [item.value for item in outcomes] == [1, None, 3]
    assert isinstance(outcomes[1].error, TransferError)


@pytest.mark.asyncio
async def test_open_calls_are_silent_after_the_deadline_and_named() -> None:
    outcomes = await gather_outcomes(
        [call("a", returns(1)), call("b", hangs())], seconds=0.01, grace_s=30.0, phase="version 3: commit"
    )
    assert [item.state for item in outcomes] == [CallState.DONE, CallState.SILENT]
    assert isinstance(outcomes[1].error, DeadlineExceeded)
    assert str(outcomes[1].error).startswith("version 3: commit: b ")


@pytest.mark.asyncio
async def test_failure_ends_the_wait_for_the_others_after_the_grace() -> None:
    outcomes = await gather_outcomes([call("a", fails()), call("b", hangs())], seconds=3000.0, grace_s=0.01, phase="p")
    assert [item.state for item in outcomes] == [CallState.FAILED, CallState.SILENT]


@pytest.mark.asyncio
async def test_first_failure_may_free_the_others() -> None:
    freed = asyncio.Event()

    async def waits() -> str:
        await freed.wait()
        return "free"

    async def free() -> None:
        freed.set()

    outcomes = await gather_outcomes(
        [call("a", fails()), call("b", waits())], seconds=3000.0, grace_s=30.0, phase="p", on_failure=free
    )
    assert [item.state for item in outcomes] == [CallState.FAILED, CallState.DONE]


@pytest.mark.asyncio
async def test_no_calls_have_no_outcomes() -> None:
    assert await gather_outcomes([], seconds=1.0, grace_s=1.0, phase="p") == []
