"""Waits for answers of processes that may die without one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

_INTERVAL_S = 0.2


async def answer_of(
    command: Awaitable[Any], death: Callable[[], Exception | None], *, interval_s: float = _INTERVAL_S
) -> Any:
    """Await a command to processes, and ask `death` meanwhile why they will never answer; None while they live.

    Raises as `command` does, or what `death` returns. How long those that live may take is for the caller to bound.
    """
    answer = asyncio.ensure_future(command)
    try:
        while not answer.done():
            await asyncio.wait((answer,), timeout=interval_s)
            cause = death()
            if not answer.done() and cause is not None:
                raise cause
        return answer.result()
    finally:
        answer.cancel()
