"""Run one coroutine to its end, unless another one that accompanies it fails first."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def ending_with(work: Coroutine[Any, Any, T], companion: Coroutine[Any, Any, None]) -> T:
    """Return what `work` returns, or raise what it raises; `companion` runs beside it and is cancelled then.

    If `companion` fails first, `work` is cancelled, waited for, and the error of `companion` is raised.
    """
    main = asyncio.create_task(work)
    beside = asyncio.create_task(companion)
    try:
        await asyncio.wait({main, beside}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done() and beside.done() and not beside.cancelled() and (error := beside.exception()) is not None:
            raise error
        return await main
    finally:
        for task in (main, beside):
            task.cancel()
        await asyncio.gather(main, beside, return_exceptions=True)
