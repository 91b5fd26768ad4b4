"""Waits on other processes, each with a deadline and with errors that say who, where and since when.

Every wait of the project on Ray goes through here. An expired wait leaves the remote call running: cancelling it
would interrupt an actor in the middle of a collective. The caller decides what becomes of the actor.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayrl.errors import DeadlineExceeded
from rayrl.infra.failures import explain_failure, is_death
from rayrl.infra.identity import ActorLabel
from rayrl.infra.stderr_tail import describe_stderr, locate_actor

# After a first failure: time in which the death of another actor, its likely cause, becomes known.
_ROOT_CAUSE_S = 2.0


async def wait_for(ref: Any, *, seconds: float, phase: str, actor: ActorLabel | str, what: str = "an answer") -> Any:
    """Return the result of an ObjectRef or of an awaitable.

    Cancelling the caller cancels an awaitable that was passed, and leaves a remote call running.

    Raises:
        DeadlineExceeded: no result in time.
        ActorError: the actor died or failed.
        RayrlError: the one that was raised in the actor.
    """
    (result,) = await wait_for_all([ref], seconds=seconds, phase=phase, actors=[actor], what=what)
    return result


async def wait_for_all(
    refs: Sequence[Any],
    *,
    seconds: float,
    phase: str,
    actors: Sequence[ActorLabel | str],
    what: str = "an answer",
) -> list[Any]:
    """Return the results in order; `actors[i]` answers `refs[i]`. Fails on the first failure, as `wait_for` does.

    If several fail within two seconds, the death of an actor is reported before errors that it caused at others.
    """
    if not refs:
        return []
    since = datetime.now(UTC)
    futures = [start_waiting(ref) for ref in refs]
    try:
        await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        if any(_failed(future) for future in futures) and not all(future.done() for future in futures):
            await asyncio.wait(futures, timeout=_ROOT_CAUSE_S)
    finally:
        for ref, future in zip(refs, futures, strict=True):
            if not future.done() and not isinstance(ref, ray.ObjectRef):
                future.cancel()
    failures = [(future, actor) for future, actor in zip(futures, actors, strict=True) if _failed(future)]
    if failures:
        failures.sort(key=lambda pair: not is_death(_exception(pair[0])))
        error, actor = _exception(failures[0][0]), failures[0][1]
        if isinstance(error, RayError):
            explained = await asyncio.to_thread(explain_failure, error, phase=phase, actor=actor)
            raise explained from error
        raise error
    silent = [actor for future, actor in zip(futures, actors, strict=True) if not future.done()]
    if silent:
        message = await asyncio.to_thread(_expired, silent, len(refs), seconds, phase, what, since)
        raise DeadlineExceeded(message)
    return [future.result() for future in futures]


async def wait_end(ref: Any) -> BaseException | None:
    """Return how a call that lasts as long as its actor ended: None in order, else with what Ray raised.

    The one wait without a deadline: it is how the end of an actor is noticed, whenever that is. Nothing else waits
    for it.
    """
    future = start_waiting(ref)
    await asyncio.wait([future])
    return future.exception()


def get_within(ref_or_refs: Any, *, seconds: float, phase: str, actor: ActorLabel | str) -> Any:
    """Return the result of one ObjectRef, or the list of those of several; for code without an event loop.

    Raises the same errors as `wait_for`.
    """
    since = datetime.now(UTC)
    started = time.monotonic()
    try:
        return ray.get(ref_or_refs, timeout=seconds)
    except GetTimeoutError as error:
        refs = list(ref_or_refs) if isinstance(ref_or_refs, Sequence) else [ref_or_refs]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        what = "an answer" if len(refs) == 1 else f"{len(refs) - len(done)} of {len(refs)} answers"
        waited = time.monotonic() - started
        raise DeadlineExceeded(_expired([actor], 1, waited, phase, what, since)) from error
    except RayError as error:
        _raise_explained(error, phase, actor)


def _raise_explained(error: RayError, phase: str, actor: ActorLabel | str) -> NoReturn:
    raise explain_failure(error, phase=phase, actor=actor) from error


def start_waiting(ref: Any) -> asyncio.Future[Any]:
    """Return a future of this event loop for an ObjectRef or an awaitable; the caller bounds the wait for it."""
    future: asyncio.Future[Any]
    if isinstance(ref, ray.ObjectRef):
        future = asyncio.wrap_future(ref.future())
    elif isinstance(ref, Awaitable):
        future = asyncio.ensure_future(ref)
    else:
        raise TypeError(f"cannot wait for {type(ref).__name__}; give an ObjectRef or an awaitable")
    # A result that comes after the deadline is nobody's: mark its exception as seen.
    future.add_done_callback(_failed)
    return future


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


def _exception(future: asyncio.Future[Any]) -> BaseException:
    error = future.exception()
    assert error is not None
    return error


def _expired(
    silent: Sequence[ActorLabel | str], asked: int, seconds: float, phase: str, what: str, since: datetime
) -> str:
    found = [locate_actor(actor) if isinstance(actor, ActorLabel) else actor for actor in silent]
    others = "" if asked == 1 else f" ({len(silent)} of {asked} did not answer: {', '.join(_names(silent))})"
    return (
        f"{phase}: waited {seconds:.3g} s for {what} from {found[0]}{others}, since {since:%Y-%m-%dT%H:%M:%SZ}; "
        f"if it is only slow, raise the limit under `deadlines` of the config\n{describe_stderr(found[0])}"
    )


def _names(actors: Sequence[ActorLabel | str]) -> list[str]:
    return [actor if isinstance(actor, str) else actor.name for actor in actors]
