"""Many concurrent calls as few batches: what arrives while a batch runs goes into the next one."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class BatchedCalls(Generic[ItemT, ResultT]):
    """One batch at a time; waits for no item longer than for the batch before it. Belongs to one event loop."""

    def __init__(self, run: Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT]]], max_batch_size: int) -> None:
        """Nothing runs before the first call.

        Args:
            run: returns one result per item, in order; what it raises is raised to every caller of the batch.
            max_batch_size: most items of one batch.
        """
        self._run = run
        self._max_batch_size = max_batch_size
        self._waiting: deque[tuple[ItemT, asyncio.Future[ResultT]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def call(self, item: ItemT) -> ResultT:
        """Return the result of one item."""
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), self._max_batch_size)
            batch = [self._waiting.popleft() for _ in range(count)]
            try:
                results = await self._run([item for item, _ in batch])
            except Exception as error:  # noqa: BLE001  it belongs to the callers, who are told below
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
