"""The vLLM engine: `AsyncLLM` in this process, its scheduler and workers in processes of their own.

    generate() --submit--> AsyncLLM ==zmq==> engine core --> workers        (vLLM's processes)
    generate() <--chunks-- output task <==zmq== engine core
    load()     --copy--> shared memory ==update_weights==> rayrl's transfer backend in each worker

- A caller of `generate` waits for vLLM's output task; the end of its request, or the death of the engine, unblocks it.
- `load` runs between two steps: it pauses unless the engine is paused already, and goes on as it was before.
- Versions come from vLLM: it labels each output with that of its weights, and the label changes only in a pause.
- close(), or the death of this process, ends vLLM's processes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rayrl.config.inference import InferenceConfig, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.errors import EngineError, IllegalTransition
from rayrl.inference import vllm_api
from rayrl.inference.child_output import ChildOutput
from rayrl.inference.engine import (
    NO_VERSION,
    EngineBusy,
    EngineStatus,
    LoadTimes,
    PauseMode,
    RequestRefused,
    WeightSpec,
)
from rayrl.inference.lifecycle import EngineState, Lifecycle
from rayrl.inference.liveness import answer_of
from rayrl.inference.request_check import check_request
from rayrl.inference.shared_weights import SharedMemoryWriter
from rayrl.inference.version_chunks import ChunkBuilder
from rayrl.inference.vllm_model import read_model
from rayrl.inference.vllm_plugin import REFUSED
from rayrl.inference.weights import check_weights, dtype_name
from rayrl.types.sampling import Chunk, GenerationRequest
from rayrl.utils.logger import get_logger

if TYPE_CHECKING:
    from torch import Tensor

_LOGGER = get_logger("inference")
_CLOSE_S = 5.0


class VllmInferenceEngine:
    """Implements `InferenceEngine` on vLLM."""

    def __init__(self, model: ModelConfig, config: InferenceConfig, *, name: str, seed: int) -> None:
        """Nothing of vLLM is imported before `start`."""
        assert isinstance(config.engine, VllmEngine), f"engine type is {config.engine.type}"
        self._name = name
        self._model = model
        self._config = config
        self._options = config.engine
        self._seed = seed
        self._lifecycle = Lifecycle(name)
        self._counters = vllm_api.Counters()
        self._output = ChildOutput(f"vLLM's own log ({name})")
        self._memory = SharedMemoryWriter()
        self._handles: dict[str, vllm_api.RequestHandle] = {}
        self._engine: Any = None
        self._version = NO_VERSION
        self._num_loads = 0
        self._total_requests = 0
        self._asleep = False
        # Pause, resume and load, one at a time and in the order of the calls.
        self._order = asyncio.Lock()

    async def start(self) -> None:
        """Start vLLM without weights. EngineError with vLLM's own root cause if it does not come up."""
        if self._lifecycle.state is not EngineState.STARTING:
            return
        start = time.monotonic()
        version = vllm_api.require_vllm()
        self._served = await asyncio.to_thread(read_model, self._model)
        try:
            engine = await asyncio.to_thread(self._start_engine)
        except Exception as error:
            self._output.wait_end(1.0)
            cause = self._output.root_cause() or f"{type(error).__name__}: {error}"
            raise self._failed_start(f"did not start: {cause}") from error
        try:
            self._lifecycle.move(EngineState.RUNNING)
        except IllegalTransition as error:
            await asyncio.to_thread(vllm_api.stop_engine, engine, _CLOSE_S)
            raise EngineError(f"engine {self._name} was closed while it started") from error
        self._engine = engine
        _LOGGER.info("engine %s runs vLLM %s, started in %.0f s", self._name, version, time.monotonic() - start)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Yield the chunks of one sequence; see `InferenceEngine.generate` for the errors."""
        params = self._accept(request)
        handle = vllm_api.RequestHandle(self._engine, request.request_id)
        self._handles[request.request_id] = handle
        chunks = ChunkBuilder(request.request_id, self._config.stream_interval, self._version)
        ended = False
        try:
            await handle.submit(request.prompt_tokens, params, salt=f"{self._version}.{self._num_loads}")
            async for output in handle.outputs():
                ended = output.finish_reason is not None
                for chunk in chunks.add(output.tokens, output.logprobs, output.starts, output.finish_reason):
                    yield chunk
        except (EngineError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises here, its engine cannot be trusted any more
            ended = True
            failure = self._fail(error)
            # Not from `error`: vLLM gives one object to all requests, whose traceback grows with each of them.
            raise failure from failure.__cause__
        finally:
            del self._handles[request.request_id]
            self._total_requests += 1
            if not ended and self._lifecycle.unavailable() is None:
                await handle.abort()

    async def abort(self, request_id: str) -> None:
        """End a request at the next step; unknown ids are ignored."""
        handle = self._handles.get(request_id)
        if handle is not None:
            await handle.abort()

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing more; returns between two steps."""
        if mode not in ("keep", "abort"):
            raise EngineError(f"pause mode {mode!r} is unknown; it is 'keep' or 'abort'")
        await self._in_order(self._pause)
        if mode == "abort":
            await asyncio.gather(*(handle.abort() for handle in list(self._handles.values())))

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._in_order(self._resume)

    async def sleep(self) -> None:
        """Give device memory back; needs `sleep_mode` and a GPU, and no request in flight."""
        self._expect_available()
        if not self._options.sleep_mode:
            raise EngineError(f"engine {self._name} cannot sleep; start it with inference.engine.sleep_mode=true")
        if self._handles:
            raise EngineError(f"engine {self._name} cannot sleep: {len(self._handles)} requests are in flight")
        await self._in_order(self._sleep)

    async def wake(self) -> None:
        """Take the memory again."""
        if self._asleep:
            await self._in_order(self._wake)

    async def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        """EngineError with the first difference if `load` would not take these."""
        self._expect_available()
        check_weights(self._served.weights, specs)

    async def staging_memory(self, num_bytes: int) -> "Tensor | None":
        """Return the memory that is shared with vLLM's workers."""
        async with self._order:
            return await asyncio.to_thread(self._memory.reserve, num_bytes)

    async def load(self, version: int, tensors: "Mapping[str, Tensor]") -> LoadTimes:
        """Replace all weights between two steps."""
        if version < 0:
            raise EngineError(f"engine {self._name} cannot load version {version}: versions start at 0")
        await self.check_weights([(name, tuple(item.shape), dtype_name(item)) for name, item in tensors.items()])
        times: LoadTimes = await self._in_order(lambda: self._load(version, tensors))
        return times

    async def checksums(self, specs: Sequence[WeightSpec]) -> Mapping[str, str]:
        """Ask vLLM's workers; they hold packed and fused weights in a layout of their own, which cannot be said."""
        self._expect_available()
        found: Mapping[str, str] = await self._guard(vllm_api.weight_checksums(self._engine, specs))
        return found

    async def status(self) -> EngineStatus:
        """Return what vLLM reported last; FAILED if its processes died, also while nothing was asked of them."""
        if self._engine is not None and (death := vllm_api.death_of(self._engine)) is not None:
            self._fail(death)
        counters, num_open = self._counters, len(self._handles)
        num_running = min(counters.num_running, num_open)
        cause = self._lifecycle.cause
        return EngineStatus(
            state=self._lifecycle.state,
            version=self._version,
            num_running=num_running,
            num_waiting=num_open - num_running,
            kv_use=counters.kv_use if num_open else 0.0,
            total_requests=self._total_requests,
            total_tokens=counters.total_tokens,
            total_prefill_tokens=counters.total_prefill_tokens,
            total_steps=counters.total_steps,
            failure=None if cause is None else f"{type(cause).__name__}: {cause}",
            total_preemptions=counters.total_preemptions,
            prefix_hit_share=counters.total_prefix_hits / max(1, counters.total_prefix_queries),
        )

    async def close(self) -> None:
        """End all requests with an error and all processes of vLLM."""
        if self._lifecycle.state is EngineState.CLOSED:
            return
        self._lifecycle.move(EngineState.CLOSED)
        if self._engine is not None:
            vllm_api.end_requests(self._engine, self._lifecycle.unavailable() or EngineError("closed"))
        await asyncio.to_thread(vllm_api.stop_engine, self._engine, _CLOSE_S)
        self._engine = None
        self._memory.close()

    def _start_engine(self) -> Any:
        with self._output.captured():
            return vllm_api.start_engine(
                self._model,
                self._config,
                max_context=self._served.limits.max_context,
                seed=self._seed,
                counters=self._counters,
            )

    def _accept(self, request: GenerationRequest) -> Any:
        """Return vLLM's parameters for a request that can be served now; raise why it cannot otherwise."""
        self._expect_available()
        if self._version == NO_VERSION:
            raise EngineError(f"engine {self._name} cannot generate: weights were never pushed to it")
        check_request(request, self._served.limits)
        if request.request_id in self._handles:
            raise RequestRefused(f"request {request.request_id!r} is in flight on engine {self._name} already")
        limit = self._options.max_batch_size + self._config.max_queued_requests
        if len(self._handles) >= limit:
            raise EngineBusy(
                f"engine {self._name} has {len(self._handles)} requests in flight, as many as "
                f"inference.engine.max_batch_size={self._options.max_batch_size} and "
                f"inference.max_queued_requests={self._config.max_queued_requests} allow; try again later or elsewhere"
            )
        return vllm_api.sampling_params(
            request.params,
            num_prompt=len(request.prompt_tokens),
            max_context=self._served.limits.max_context,
            eos_token_ids=self._served.eos_token_ids,
        )

    async def _in_order(self, command: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with self._order:
                return await command()

        # Shielded: a caller that gives up must not leave an update half done.
        return await asyncio.shield(asyncio.ensure_future(run()))

    async def _load(self, version: int, tensors: "Mapping[str, Tensor]") -> LoadTimes:
        # Digested, and copied if it was staged elsewhere, while requests go on.
        shared = await asyncio.to_thread(self._memory.write, version, tensors)
        was_running = self._lifecycle.state is EngineState.RUNNING
        paused = time.perf_counter()
        await self._pause()
        loading = time.perf_counter()
        try:
            weights, idle = shared.to_dict(), not self._handles
            await self._guard(vllm_api.update_weights(self._engine, weights, version, idle=idle))
            self._version = version
            # After a lost training group a version number comes again, with other weights.
            self._num_loads += 1
            loaded = time.perf_counter()
        finally:
            if was_running and self._lifecycle.unavailable() is None:
                await self._resume()
        return LoadTimes(load_s=loaded - loading, pause_s=time.perf_counter() - paused)

    async def _sleep(self) -> None:
        await self._pause()
        await self._guard(vllm_api.sleep(self._engine))
        self._asleep = True

    async def _wake(self) -> None:
        self._expect_available()
        await self._guard(vllm_api.wake(self._engine))
        self._asleep = False

    async def _pause(self) -> None:
        self._expect_available()
        if self._lifecycle.state is not EngineState.PAUSED:
            await self._guard(vllm_api.pause(self._engine))
            self._lifecycle.move(EngineState.PAUSED)

    async def _resume(self) -> None:
        self._expect_available()
        if self._asleep:
            raise EngineError(f"engine {self._name} is asleep; wake it before it resumes")
        if self._lifecycle.state is not EngineState.RUNNING:
            await self._guard(vllm_api.resume(self._engine))
            self._lifecycle.move(EngineState.RUNNING)

    async def _guard(self, command: Awaitable[Any]) -> Any:
        """Await a command to vLLM. An update that every worker refused changes nothing; all else fails the engine."""
        try:
            return await answer_of(command, partial(vllm_api.death_of, self._engine))
        except Exception as error:
            if REFUSED in str(error) and self._options.tensor_parallel == 1:
                self._output.clear()
                raise EngineError(f"engine {self._name} keeps version {self._version}: {error}") from error
            raise self._fail(error) from error

    def _expect_available(self) -> None:
        unavailable = self._lifecycle.unavailable()
        if unavailable is not None:
            raise unavailable

    def _fail(self, error: Exception) -> EngineError:
        """Keep the first cause, show vLLM's last lines once, and return the error that callers get."""
        if self._lifecycle.unavailable() is None:
            # vLLM's own error says no more than that its engine is dead.
            cause = self._output.root_cause() or f"{type(error).__name__}: {error}"
            _LOGGER.error("engine %s failed: %s\n%s", self._name, cause, self._output.tail())
            self._lifecycle.fail(EngineError(f"in vLLM: {cause}"))
        return self._lifecycle.unavailable() or EngineError(f"engine {self._name} has ended")

    def _failed_start(self, reason: str) -> EngineError:
        error = EngineError(f"vLLM {reason}\n{self._output.tail()}")
        self._lifecycle.fail(error)
        vllm_api.end_processes()
        return EngineError(f"engine {self._name}: {error}")


def make_vllm_engine(model: ModelConfig, config: InferenceConfig, *, name: str, seed: int) -> VllmInferenceEngine:
    """Return the engine of a config with `engine.type: vllm`. EngineError if it asks for another number of GPUs."""
    options, gpus = config.engine, config.gpus_per_engine
    if isinstance(options, VllmEngine) and options.sleep_mode and gpus == 0:
        raise EngineError(
            "inference.engine.sleep_mode=true needs GPUs, but inference.gpus_per_engine=0; leave it out on CPUs"
        )
    if isinstance(options, VllmEngine) and gpus > 0 and max(1.0, gpus) != options.tensor_parallel:
        raise EngineError(
            f"inference.engine.tensor_parallel={options.tensor_parallel} needs as many GPUs, but "
            f"inference.gpus_per_engine={gpus:g}; set both to the same number"
        )
    return VllmInferenceEngine(model, config, name=name, seed=seed)
