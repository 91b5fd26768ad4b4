"""The training engine: layout, optimizer, schedule and micro-batches."""

from typing import Literal, Self

from pydantic import Field, model_validator

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
    sharded_load: bool = False
    """Each worker reads only the parts of the weights that it holds: for models that do not fit on one rank."""
    cpu_offload: bool = False
    """Parameters, gradients and moments stay in host memory, where the optimizer runs; blocks visit the device."""
    compile: bool = False
    """Compile each block with `torch.compile`; needs a C++ compiler on CPU, and pays off over many steps."""


class ParallelConfig(Section):
    """Degrees of the mesh axes; replicate x data x context x tensor is the number of training workers."""

    data: int = Field(default=1, gt=0)
    """Data parallel: parameters, gradients and moments are sharded over it, each rank has its own trajectories."""
    tensor: int = Field(default=1, gt=0)
    """Tensor parallel: matrices are split by the plan of the model's family; divides attention and key-value heads."""
    context: int = Field(default=1, gt=0)
    """Context parallel: each rank has a part of every sequence; divides the heads that `tensor` leaves to a rank."""
    replicate: int = Field(default=1, gt=0)
    """Hybrid sharding: so many copies of the sharded model, each with its own trajectories."""
    expert: int = Field(default=1, gt=0)
    """Expert parallel, for mixtures of experts: divides `data`, whose ranks hold different experts then."""
    expert_tensor: int = Field(default=1, gt=0)
    """Tensor parallel inside experts: 1 (each tensor rank has whole experts) or the value of `tensor`."""

    @property
    def world_size(self) -> int:
        """Training workers."""
        return self.replicate * self.data * self.context * self.tensor

    @property
    def batch_ranks(self) -> int:
        """Shares into which the trajectories of a step are divided."""
        return self.replicate * self.data

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.data % self.expert:
            raise ValueError(
                f"training.parallel.expert={self.expert} does not divide training.parallel.data={self.data}: experts "
                f"are spread over data ranks; set data to a multiple of expert"
            )
        if self.expert_tensor not in (1, self.tensor):
            raise ValueError(
                f"training.parallel.expert_tensor={self.expert_tensor} must be 1 or training.parallel.tensor="
                f"{self.tensor}"
            )
        return self


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
