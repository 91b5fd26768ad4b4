"""The contract of an inference engine: requests of token ids in, chunks of token ids with logprobs and version out.

    caller --generate--> [queue] --admitted--> [running] --chunks--> caller
                            load/pause/resume act between two steps of the running requests

Every implementation passes the same contract suite, `tests/inference/test_engine_contract.py`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rayrl.errors import EngineError
from rayrl.inference.lifecycle import EngineState
from rayrl.types.sampling import Chunk, GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor

NO_VERSION = -1
"""Version of an engine to which no weights have been pushed yet."""

WeightSpec = tuple[str, tuple[int, ...], str]
"""Name, shape and data type, as torch names it without `torch.`, of one weight."""

PauseMode = Literal["keep", "abort"]


class EngineBusy(EngineError):
    """The queue of the engine is full; the same request can succeed later or on another engine."""


class RequestRefused(EngineError):
    """The request itself cannot be served by this engine, now or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A snapshot of one engine, at most one step old.

    Example: `EngineStatus(state=EngineState.RUNNING, version=3, num_running=64, num_waiting=10, kv_use=0.4,
    total_requests=900, total_tokens=14400, total_prefill_tokens=6800, total_steps=300, failure=None)`.
    """

    state: EngineState
    version: int
    """Weights that the next token is sampled with; -1 before the first load."""
    num_running: int
    """Sequences that are decoded now."""
    num_waiting: int
    """Accepted requests that have no slot yet."""
    kv_use: float
    """Tokens in the cache over what it may hold, between 0 and 1."""
    total_requests: int
    """Requests that ended since the start, whatever the reason."""
    total_tokens: int
    """Sampled tokens since the start."""
    total_prefill_tokens: int
    """Prompt tokens that went through the model since the start; prompts shared by a group count once."""
    total_steps: int
    """Forward passes since the start."""
    failure: str | None
    """Type and message of what made the engine fail."""
    total_preemptions: int = 0
    """Running requests that were put back into the queue for want of KV cache, since the start."""
    prefix_hit_share: float = 0.0
    """Prompt tokens found in the prefix cache over those looked up, since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """How long new weights took.

    Example: `LoadTimes(load_s=0.12, pause_s=0.13)`.
    """

    load_s: float
    """Putting them into the model, in seconds."""
    pause_s: float
    """Nothing was sampled for so long, the load included, in seconds."""


class InferenceEngine(Protocol):
    """One replica of the model. All methods are called from one event loop."""

    async def start(self) -> None:
        """Load the model; returns when the engine can take weights. Raises what went wrong, ModelError included."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Yield the chunks of one sequence; the last one carries the finish reason.

        Closing the iterator early aborts the request.

        Raises:
            RequestRefused: prompt too long, parameter out of range, or an id that is in flight already.
            EngineBusy: the queue is full.
            EngineError: no weights were pushed yet, or the engine failed or was closed, now or while generating.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request at the next step with finish reason `abort`; unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing more from the next step on; `keep` holds the requests in flight, `abort` ends them."""
        ...

    async def resume(self) -> None:
        """Go on after a pause; without one nothing happens."""
        ...

    async def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        """EngineError with the first difference if these are not exactly the weights that `load` needs."""
        ...

    async def staging_memory(self, num_bytes: int) -> "Tensor | None":
        """Return uint8 memory on the CPU in which the next version may be staged, so that `load` copies it no more.

        It keeps its bytes until the next call, which waits for a load that still reads from it; after a load of tensors
        in it, the next call may give other memory. None: stage anywhere.
        """
        ...

    async def load(self, version: int, tensors: "Mapping[str, Tensor]") -> LoadTimes:
        """Replace all weights between two steps; requests in flight go on with the new ones and keep their KV.

        EngineError if a parameter is missing, unknown or of another shape; then the old weights stay.
        """
        ...

    async def sleep(self) -> None:
        """Give device memory back: weights go to host memory, the KV cache is dropped. The engine is paused after it.

        EngineError while requests are in flight, and where the platform or the engine cannot do it; then nothing
        has changed.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again, with the weights of before; the engine stays paused. Awake, nothing happens."""
        ...

    async def checksums(self, specs: Sequence[WeightSpec]) -> Mapping[str, str]:
        """Return `weight_manifest.checksum_of` of the weights in use, by name.

        Of the weights in `specs` only those that the engine can say: it may hold others in a layout of its own.
        """
        ...

    async def status(self) -> EngineStatus:
        """Return a snapshot; works in every state."""
        ...

    async def close(self) -> None:
        """End all requests with an error and free everything; a second call does nothing."""
        ...
