"""An inference engine whose steps run in a thread of their own.

    event loop                                   engine thread
    generate() --submit--> [command queue] ----> drains it between two steps
    generate() <--chunks-- call_soon_threadsafe  step of the batcher
    load/pause/abort/close --command + future--> runs it, resolves the future

- The thread waits for a command when nothing is to be sampled (no request, paused, or no step allowed by the gate).
- A caller of `generate` waits on its own queue; chunks, the end of its request, or a failure of the thread fill it.
- A caller of a command waits on a future; the thread, or its failure, resolves it.
- close(): the thread leaves at the next command; every caller that still waits gets an error.
- failure: the cause is kept, given to every caller that waits, and raised to every later one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from rayrl.config.inference import InferenceConfig
from rayrl.errors import EngineError, IllegalTransition
from rayrl.inference.backpressure import QueueLimit
from rayrl.inference.batching import Batcher, Event
from rayrl.inference.engine import NO_VERSION, EngineStatus, LoadTimes, PauseMode, RequestRefused, WeightSpec
from rayrl.inference.lifecycle import EngineState, Lifecycle
from rayrl.inference.request_check import check_request
from rayrl.inference.staging_memory import StagingMemory
from rayrl.inference.step_gate import StepGate
from rayrl.inference.token_model import TokenModel
from rayrl.types.sampling import Chunk, GenerationRequest
from rayrl.utils.logger import get_logger

if TYPE_CHECKING:
    from torch import Tensor

_LOGGER = get_logger("inference")
_CLOSE_S = 60.0
"""One step may have to end first."""

Command = tuple[Callable[[], Any], "Future[Any] | None"]


class _Leave(Exception):
    pass


class ThreadedEngine:
    """Implements `InferenceEngine` over a `TokenModel`."""

    def __init__(
        self,
        model: TokenModel,
        config: InferenceConfig,
        *,
        max_batch_size: int,
        prefill_tokens: int,
        name: str = "engine",
        seed: int = 0,
        gate: StepGate | None = None,
    ) -> None:
        """`seed` gives seeds to requests without one; `gate` lets tests allow single steps."""
        self._name = name
        self._model = model
        self._limit = QueueLimit(name, config.max_queued_requests)
        self._batcher = Batcher(
            model,
            max_batch_size=max_batch_size,
            prefill_tokens=prefill_tokens,
            stream_interval=config.stream_interval,
            seed=seed,
            on_dequeue=self._limit.leave,
        )
        self._gate = gate
        self._lifecycle = Lifecycle(name)
        self._memory = StagingMemory()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._command_lock = Lock()
        self._queues: dict[str, asyncio.Queue[Chunk | EngineError]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._started: Future[None] = Future()
        self._snapshot = self._take_snapshot()

    # Called on the event loop.

    async def start(self) -> None:
        """Load the model in the engine's thread; raises what went wrong."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            if self._gate is not None:
                self._gate.on_allow(lambda: self._put((_nothing, None)))
            self._thread = Thread(target=self._run, name=f"engine-{self._name}", daemon=True)
            self._thread.start()
        # Shielded: a caller that gives up must not cancel the start for the others.
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Yield the chunks of one sequence; see `InferenceEngine.generate` for the errors."""
        unavailable = self._lifecycle.unavailable()
        if unavailable is not None:
            raise unavailable
        if self._batcher.version == NO_VERSION:
            raise EngineError(f"engine {self._name} cannot generate: weights were never pushed to it")
        check_request(request, self._model.limits)
        request_id = request.request_id
        if request_id in self._queues:
            raise RequestRefused(f"request {request_id!r} is in flight on engine {self._name} already")
        self._limit.enter()
        queue: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()
        self._queues[request_id] = queue
        ended = False
        try:
            self._put((lambda: self._batcher.submit(request), None))
            while not ended:
                item = await queue.get()
                ended = isinstance(item, EngineError) or item.finish_reason is not None
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            del self._queues[request_id]
            if not ended and self._lifecycle.unavailable() is None:
                self._put((lambda: self._publish(self._batcher.abort(request_id)), None))

    async def abort(self, request_id: str) -> None:
        """End a request at the next step; unknown ids are ignored."""
        await self._call(lambda: self._publish(self._batcher.abort(request_id)))

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing more; returns between two steps."""
        if mode not in ("keep", "abort"):
            raise EngineError(f"pause mode {mode!r} is unknown; it is 'keep' or 'abort'")
        await self._call(lambda: self._pause(mode))

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._call(lambda: self._lifecycle.move(EngineState.RUNNING))

    async def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        """EngineError with the first difference if `load` would not take these."""
        await self._call(lambda: self._model.check_weights(specs))

    async def staging_memory(self, num_bytes: int) -> "Tensor | None":
        """Return the area that does not hold the weights in use."""
        # A load that its caller gave up may still be in the queue.
        await self._call(_nothing)
        return await asyncio.to_thread(self._memory.reserve, num_bytes)

    async def load(self, version: int, tensors: "Mapping[str, Tensor]") -> LoadTimes:
        """Replace all weights between two steps."""

        def load() -> LoadTimes:
            start = time.perf_counter()
            may_keep = self._memory.holds(tensors.values())
            events, kept = self._batcher.load(version, tensors, may_keep=may_keep)
            if kept:
                self._memory.adopt()
            self._publish(events)
            seconds = time.perf_counter() - start
            # The thread that loads is the one that samples.
            return LoadTimes(load_s=seconds, pause_s=seconds)

        times: LoadTimes = await self._call(load)
        return times

    async def checksums(self, specs: Sequence[WeightSpec]) -> Mapping[str, str]:
        """Compute them between two steps."""
        found: Mapping[str, str] = await self._call(lambda: self._model.checksums(specs))
        return found

    async def sleep(self) -> None:
        """Refused: the memory of this engine is that of its process."""
        raise EngineError(
            f"engine {self._name} cannot sleep: only vLLM on GPUs can, with inference.engine.sleep_mode=true"
        )

    async def wake(self) -> None:
        """Nothing: it never sleeps."""

    async def status(self) -> EngineStatus:
        """Return a snapshot, at most one step old; never waits for the thread."""
        cause = self._lifecycle.cause
        return replace(
            self._snapshot,
            state=self._lifecycle.state,
            num_waiting=self._limit.num_waiting,
            failure=None if cause is None else f"{type(cause).__name__}: {cause}",
        )

    async def close(self) -> None:
        """Leave the thread and end all requests with an error. EngineError if the thread does not end in time."""
        if self._lifecycle.state is EngineState.CLOSED:
            return
        self._put((_leave, None))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE_S)
            if self._thread.is_alive():
                stuck = EngineError(f"engine {self._name} is still in one step after {_CLOSE_S} s of waiting to close")
                self._end(stuck)
                self._commands.put((_leave, None))
                self._end_all_callers()
                raise stuck
        self._end(None)
        self._end_all_callers()

    async def _call(self, command: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._put((command, future))
        return await asyncio.wrap_future(future)

    def _put(self, command: Command) -> None:
        # Under the lock: a command is either seen by the thread, or by the clean-up after its failure.
        with self._command_lock:
            is_starting = self._thread is not None and not self._started.done()
            unavailable = None if is_starting else self._lifecycle.unavailable()
            if unavailable is None:
                self._commands.put(command)
        if unavailable is not None and command[1] is not None:
            command[1].set_exception(unavailable)

    def _deliver(self, events: list[Event]) -> None:
        for request_id, item in events:
            queue = self._queues.get(request_id)
            if queue is not None:
                queue.put_nowait(item)

    def _end_all_callers(self) -> None:
        for queue in self._queues.values():
            queue.put_nowait(self._lifecycle.unavailable() or EngineError(f"engine {self._name} has ended"))

    # Called in the engine's thread.

    def _run(self) -> None:
        try:
            self._model.open()
            self._lifecycle.move(EngineState.RUNNING)
            self._started.set_result(None)
            while True:
                self._run_commands()
                if self._can_sample() and (self._gate is None or self._gate.take()):
                    self._publish(self._batcher.step())
        except _Leave:
            pass
        except BaseException as error:  # noqa: BLE001 - kept, and raised to every caller that waits or comes later
            self._fail(error)

    def _run_commands(self) -> None:
        """Run what is in the queue; wait for something if there is nothing to sample."""
        block = not self._can_sample() or (self._gate is not None and not self._gate.is_open)
        while True:
            try:
                command, future = self._commands.get(block=block)
            except Empty:
                return
            block = False
            # From here on the caller cannot cancel the future any more, so that setting it never raises.
            if future is not None and not future.set_running_or_notify_cancel():
                continue
            try:
                result = command()
            except (EngineError, IllegalTransition) as error:
                if future is None:
                    raise
                future.set_exception(error)
            except Exception as error:
                if future is not None:
                    future.set_exception(error)
                raise
            else:
                if future is not None:
                    self._snapshot = self._take_snapshot()
                    future.set_result(result)

    def _can_sample(self) -> bool:
        return self._lifecycle.state is EngineState.RUNNING and self._batcher.has_work

    def _pause(self, mode: PauseMode) -> None:
        self._lifecycle.move(EngineState.PAUSED)
        if mode == "abort":
            self._publish(self._batcher.abort_all())

    def _publish(self, events: list[Event]) -> None:
        # The snapshot first: whoever has got its last chunk sees a status without that request.
        self._snapshot = self._take_snapshot()
        if events and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _fail(self, error: BaseException) -> None:
        _LOGGER.error("engine %s failed: %s: %s", self._name, type(error).__name__, error, exc_info=error)
        self._end(error)
        if not self._started.done():
            self._started.set_exception(error)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_all_callers)

    def _end(self, cause: BaseException | None) -> None:
        """Become FAILED, or CLOSED without a cause, and answer the commands that nobody runs any more."""
        pending: list[Future[Any]] = []
        with self._command_lock:
            if cause is None:
                self._lifecycle.move(EngineState.CLOSED)
            else:
                self._lifecycle.fail(cause)
            while not self._commands.empty():
                future = self._commands.get()[1]
                if future is not None and future.set_running_or_notify_cancel():
                    pending.append(future)
        for future in pending:
            future.set_exception(self._lifecycle.unavailable() or EngineError(f"engine {self._name} has ended"))

    def _take_snapshot(self) -> EngineStatus:
        batcher = self._batcher
        return EngineStatus(
            state=self._lifecycle.state,
            version=batcher.version,
            num_running=batcher.num_running,
            num_waiting=self._limit.num_waiting,
            kv_use=batcher.kv_use if batcher.num_running else 0.0,
            total_requests=batcher.total_requests,
            total_tokens=batcher.total_tokens,
            total_prefill_tokens=batcher.total_prefill_tokens,
            total_steps=batcher.total_steps,
            failure=None,
        )


def _nothing() -> None:
    """Wakes the thread."""


def _leave() -> None:
    raise _Leave
