"""The training engine: layout, optimizer, schedule and micro-batches."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class EngineOptions(Section):
    """What all training engines have."""

    autocast: Literal["none", "bfloat16"] = "none"
    """Data type of the matrix products; master weights, logprobs and losses stay float32."""
    activation_checkpointing: bool = False
    """Keep no activations inside layers: less memory, about a third more time."""
    logprob_chunk_tokens: int = Field(default=1024, gt=0)
    """Tokens whose logits over the vocabulary exist at once."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its samples, where the model allows it and it is cheaper."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel of transformers."""


class FsdpEngine(EngineOptions):
    """FSDP2 (`fully_shard`) of torch; with one rank the model is not sharded."""

    type: Literal["fsdp"]


class ParallelConfig(Section):
    """Degrees of the mesh axes; their product is the number of training workers."""

    data: int = Field(default=1, gt=0)
    """Data parallel, sharded."""


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; not applied to biases and norms."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class ScheduleConfig(Section):
    """Learning rate over optimizer steps."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up, down to `min_ratio` at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear growth from 0."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Last learning rate, as a share of the peak."""


class TrainingConfig(Section):
    """The training worker group."""

    optimizer: OptimizerConfig
    """Optimizer."""
    engine: FsdpEngine = FsdpEngine(type="fsdp")
    """Engine."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate schedule."""
    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Tokens of one forward pass, padding included; a longer sequence is a micro-batch of its own."""
    cpus_per_worker: float = Field(default=1.0, ge=0)
    """Logical CPUs that Ray reserves for one worker."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """GPUs of one worker; 0 runs on CPU with gloo."""
    threads_per_worker: int = Field(default=1, gt=0)
    """Threads of torch in one worker."""
