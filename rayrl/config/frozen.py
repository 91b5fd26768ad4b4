"""Models that are only asked: a reward model, or a teacher. Each is hosted by an actor of its own."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class FrozenModelSection(Section):
    """A local model folder and the actor that hosts it."""

    path: str
    """Folder of the model, absolute or relative to the working directory."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Data type of the matrix products; the weights are kept in float32."""
    trust_remote_code: bool = False
    """Run code from the model folder. Only for folders that you trust."""
    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Tokens of one forward pass, padding included."""
    cpus: float = Field(default=1.0, ge=0)
    """Logical CPUs that Ray reserves for the actor."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of the actor; 0 runs on CPU."""
    threads: int = Field(default=1, gt=0)
    """Threads of torch in the actor."""
    max_restarts: int = Field(default=3, ge=0)
    """Times that Ray starts the actor again after it died; calls that were running are made again."""


class TeacherConfig(FrozenModelSection):
    """The teacher of on-policy distillation: it scores the tokens that the student sampled. It needs the student's
    tokenizer."""
