"""Run blocking code beside the event loop, on a thread that cannot keep anything waiting."""

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def call_in_thread(function: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> ResultT:
    """Return what `function` returns, or raise what it raises; a cancelled call leaves its thread behind.

    Each call has a daemon thread of its own. On the shared pool of asyncio a few calls that never return would block
    all others, and the exit of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()
    context = copy_context()

    def deliver(result: ResultT | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: ResultT | None = None
        error: BaseException | None = None
        try:
            result = context.run(function, *args, **kwargs)
        except StopIteration as stop:  # a future cannot carry it
            error = RuntimeError(f"StopIteration: {stop.value}")
        except Exception as raised:  # noqa: BLE001 - raised again in the caller
            error = raised
        except BaseException as raised:  # noqa: BLE001 - `exit()` in user code would end the caller's event loop
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:
            # The loop was closed meanwhile: nobody waits for the result.
            return

    threading.Thread(target=run, name="rayrl-call", daemon=True).start()
    return await future
