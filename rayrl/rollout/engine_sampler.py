"""The `Sampler` over inference engines: routing, batching of calls, and continuation elsewhere.

    episodes --sample()--> pending per engine --one call per event-loop tick--> engine actor
    episodes <--queue----- reader of that call <--lists of chunks-------------- engine actor

- An episode waits on its own queue; the reader of its call, or that reader's failure, unblocks it.
- A reader waits on the engine's stream, at most `idle_timeout_s` for each message.
- A request whose engine fails goes on elsewhere with the tokens it has: their versions stay those that sampled them.
- A request that finds no engine waits for `connect` to bring one, at most `engine_wait_s`.
- An episode that is cancelled (deadline, shutdown) aborts its request on the engine, which frees its slot.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from rayrl.errors import ActorDied, ActorError, DeadlineExceeded, EngineError
from rayrl.rollout.router import Router
from rayrl.types.sampling import Chunk, Completion, GenerationRequest, RequestFailure, SamplingParams, join_chunks
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("rollout.sampler")
_RETRY_S = 1.0
"""Pause before a request goes again to an engine that failed it."""
_BUSY_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

StreamItem = Chunk | RequestFailure | Exception


class EngineClient(Protocol):
    """One engine as the sampler sees it."""

    def stream(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Chunk | RequestFailure]]:
        """Yield what the engine has, until all requests have ended."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Ask the engine to forget requests; does not wait."""
        ...


class EngineSampler:
    """Samples completions from a set of engines that may change while requests are in flight."""

    def __init__(self, *, name: str, idle_timeout_s: float, max_attempts: int, engine_wait_s: float = 0.0) -> None:
        """Connected to nothing yet.

        Args:
            name: prefix of request ids.
            idle_timeout_s: limit of each message of an engine.
            max_attempts: tries of a request, full queues and engines that died not counted.
            engine_wait_s: how long a request waits for an engine while none is connected.
        """
        self._engine_wait_s = engine_wait_s
        self._dead: set[str] = set()
        self._connected = asyncio.Event()
        self._clients: dict[str, EngineClient] = {}
        self._router = Router([])
        self._idle_timeout_s = idle_timeout_s
        self._max_attempts = max_attempts
        self._ids = (f"{name}-{number}" for number in itertools.count())
        self._pending: dict[str, list[GenerationRequest]] = {}
        self._queues: dict[str, asyncio.Queue[StreamItem]] = {}
        self._readers: set[asyncio.Task[None]] = set()

    def connect(self, clients: Mapping[str, EngineClient]) -> None:
        """Route to exactly these engines from now on; requests in flight elsewhere go on until they end.

        Names are never used twice: an engine that died stays dead here, even if the caller has not noticed yet.
        """
        alive = {name: client for name, client in clients.items() if name not in self._dead}
        for gone in set(self._clients) - set(alive):
            self._router.remove(gone)
        for name in alive:
            self._router.add(name)
        self._clients = alive
        self._connected.set()

    @property
    def load(self) -> dict[str, int]:
        """Requests in flight per engine."""
        return self._router.load

    async def sample(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        """Return one completion. EngineError with the last cause if no engine could give one.

        An engine that dies costs no attempt: how often engines are replaced is bounded elsewhere.
        """
        chunks: list[Chunk] = []
        failed: set[str] = set()
        last_error: Exception | None = None
        attempt = busy = 0
        while attempt < self._max_attempts:
            engine = self._router.acquire(session_id, frozenset(failed))
            if engine is None and self._clients:
                # All have failed this request: a replacement may be on its way, or it was a passing fault.
                await self._wait_connected(min(self._engine_wait_s, _RETRY_S))
                engine = self._router.acquire(session_id, frozenset(failed)) or self._router.acquire(session_id)
            if engine is None:
                await self._wait_for_engine(last_error)
                continue
            try:
                await self._generate(engine, list(prompt_tokens), params, session_id, chunks)
                return join_chunks(chunks)
            except EngineRefusal as refusal:
                if not refusal.retry:
                    raise EngineError(f"engine {engine}: {refusal}") from None
                # A full queue is no failure of the episode: its own deadline bounds how long this goes on.
                await asyncio.sleep(_BUSY_BACKOFF_S[min(busy, len(_BUSY_BACKOFF_S) - 1)])
                busy += 1
            except ActorDied as error:
                last_error = error
                self._bury(engine)
                _LOGGER.warning("request goes on elsewhere with %d tokens: %s", _num_tokens(chunks), error)
            except (ActorError, DeadlineExceeded, EngineError) as error:
                last_error = error
                failed.add(engine)
                attempt += 1
                if not params.can_continue:
                    chunks.clear()
                _LOGGER.warning("request goes on elsewhere with %d tokens: %s", _num_tokens(chunks), error)
            finally:
                self._router.release(engine)
        raise EngineError(f"no engine completed a request in {attempt} attempts; last cause: {last_error}")

    def _bury(self, engine: str) -> None:
        self._dead.add(engine)
        self._clients.pop(engine, None)
        self._router.remove(engine)

    async def _wait_for_engine(self, last_error: Exception | None) -> None:
        """Return once `connect` was called again. EngineError if that takes too long."""
        if not await self._wait_connected(self._engine_wait_s):
            cause = "" if last_error is None else f"; last cause: {last_error}"
            raise EngineError(
                f"no inference engine is connected, and none came within {self._engine_wait_s:g} s "
                f"(a share of rollout.episode_timeout_s){cause}"
            )

    async def _wait_connected(self, seconds: float) -> bool:
        """Return whether `connect` was called within `seconds`."""
        self._connected.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._connected.wait()
        except TimeoutError:
            return False
        return True

    async def _generate(
        self,
        engine: str,
        prompt_tokens: list[int],
        params: SamplingParams,
        session_id: str | None,
        chunks: list[Chunk],
    ) -> None:
        """Append the chunks of one request to `chunks`, which may hold those of an earlier, interrupted try."""
        done = [token for chunk in chunks for token in chunk.tokens]
        if len(done) >= params.max_new_tokens:
            chunks[-1] = replace(chunks[-1], finish_reason="length")
            return
        request = GenerationRequest(
            request_id=next(self._ids),
            prompt_tokens=(*prompt_tokens, *done),
            params=replace(
                params,
                max_new_tokens=params.max_new_tokens - len(done),
                min_new_tokens=max(0, params.min_new_tokens - len(done)),
            ),
            session_id=session_id,
        )
        queue: asyncio.Queue[StreamItem] = asyncio.Queue()
        self._queues[request.request_id] = queue
        self._submit(engine, request)
        finished = False
        try:
            while not finished:
                item = await queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                if isinstance(item, RequestFailure):
                    finished = True
                    raise EngineRefusal(item.message, item.retry)
                chunks.append(item)
                finished = item.finish_reason is not None
        finally:
            del self._queues[request.request_id]
            if not finished and engine in self._clients:
                self._clients[engine].abort([request.request_id])

    def _submit(self, engine: str, request: GenerationRequest) -> None:
        if engine not in self._pending:
            self._pending[engine] = []
            # One call per engine and tick: all samples of a group travel, and are prefilled, together.
            asyncio.get_running_loop().call_soon(self._flush, engine)
        self._pending[engine].append(request)

    def _flush(self, engine: str) -> None:
        requests = [item for item in self._pending.pop(engine) if item.request_id in self._queues]
        if requests:
            reader = asyncio.get_running_loop().create_task(self._read(engine, requests))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)

    async def _read(self, engine: str, requests: list[GenerationRequest]) -> None:
        """Hand the items of one call to the episodes that wait for them; a failure goes to all that still wait."""
        open_ids = {request.request_id for request in requests}
        failure: Exception | None = None
        try:
            client = self._clients.get(engine)
            if client is None:
                raise ActorDied(f"engine {engine} was removed before it was asked")
            stream = aiter(client.stream(requests))
            while open_ids:
                async with asyncio.timeout(self._idle_timeout_s):
                    items = await anext(stream)
                for item in items:
                    if isinstance(item, RequestFailure) or item.finish_reason is not None:
                        open_ids.discard(item.request_id)
                    if item.request_id in self._queues:
                        self._queues[item.request_id].put_nowait(item)
        except StopAsyncIteration:
            failure = EngineError(f"engine {engine} ended its stream with {len(open_ids)} requests unfinished")
        except TimeoutError:
            failure = DeadlineExceeded(
                f"engine {engine} sent nothing for {self._idle_timeout_s} s (rollout.episode_timeout_s) while "
                f"{len(open_ids)} requests waited"
            )
        except (ActorError, EngineError) as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - a lost engine becomes a failure of its requests, not of the worker
            failure = ActorError(f"call to engine {engine} failed: {type(error).__name__}: {error}")
        if failure is not None:
            for request_id in open_ids & set(self._queues):
                self._queues[request_id].put_nowait(failure)

    async def close(self) -> None:
        """Stop all readers."""
        for reader in list(self._readers):
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


class EngineRefusal(EngineError):
    """The engine is alive but does not take this request."""

    def __init__(self, message: str, retry: bool) -> None:
        super().__init__(message, retry)
        self.message = message
        self.retry = retry

    def __str__(self) -> str:
        return self.message


def _num_tokens(chunks: list[Chunk]) -> int:
    return sum(len(chunk.tokens) for chunk in chunks)
