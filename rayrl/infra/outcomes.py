"""Calls to many actors of which each may fail for itself: one outcome per actor instead of the first error.

For calls in which the actors depend on one another, such as a collective: once one has failed, the others get
`grace_s` to fail in their turn; whoever has not answered by then is SILENT.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ray.exceptions import RayError

from rayrl.errors import DeadlineExceeded, RayrlError
from rayrl.infra.failures import explain_failure, is_death
from rayrl.infra.identity import ActorLabel
from rayrl.infra.waiting import start_waiting


class CallState(Enum):
    """How a call ended."""

    DONE = "it returned"
    FAILED = "it raised, and the actor lives"
    DIED = "the actor is gone"
    SILENT = "no answer in time"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """A call that was sent."""

    actor: ActorLabel
    """Whom it was sent to."""
    ref: Any
    """ObjectRef or awaitable of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """How one call ended.

    Example: `CallOutcome(member="inference-1", state=CallState.DIED, error=ActorDied("..."))`.
    """

    member: str
    """Name of the actor."""
    state: CallState
    value: Any = None
    """What it returned, if DONE."""
    error: RayrlError | None = None
    """What went wrong, otherwise; names phase and actor."""


async def gather_outcomes(
    calls: Sequence[PendingCall],
    *,
    seconds: float,
    grace_s: float,
    phase: str,
    on_failure: Callable[[], Awaitable[None]] | None = None,
) -> list[CallOutcome]:
    """Return one outcome per call, in order. Calls that are still open in the end are left running.

    `on_failure` is awaited once the first call has failed while others are open: it may free those that wait for it.
    """
    if not calls:
        return []
    deadline = asyncio.get_running_loop().time() + seconds
    futures = [start_waiting(call.ref) for call in calls]
    _, pending = await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    if pending and any(future.done() for future in futures):
        failed = any(future.done() and future.exception() is not None for future in futures)
        if failed:
            if on_failure is not None:
                await on_failure()
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait(pending, timeout=min(grace_s, left))
    return [await _outcome(call, future, seconds, phase) for call, future in zip(calls, futures, strict=True)]


async def _outcome(call: PendingCall, future: asyncio.Future[Any], seconds: float, phase: str) -> CallOutcome:
    name = call.actor.name
    if not future.done():
        error = DeadlineExceeded(f"{phase}: {call.actor} did not answer (limit {seconds:g} s, less once others failed)")
        return CallOutcome(member=name, state=CallState.SILENT, error=error)
    raised = future.exception()
    if raised is None:
        return CallOutcome(member=name, state=CallState.DONE, value=future.result())
    if isinstance(raised, RayError):
        state = CallState.DIED if is_death(raised) else CallState.FAILED
        explained = await asyncio.to_thread(explain_failure, raised, phase=phase, actor=call.actor)
        return CallOutcome(member=name, state=state, error=explained)
    if isinstance(raised, RayrlError):
        return CallOutcome(member=name, state=CallState.FAILED, error=raised)
    raise raised
