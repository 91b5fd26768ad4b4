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


InferenceEngineConfig = Annotated[TransformersEngine | ScriptedEngine, Field(discriminator="type")]


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
