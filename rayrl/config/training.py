"""The training engine: layout, optimizer, schedule and micro-batches."""

from typing import Annotated, Any, Literal, Self

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
    packing: bool = True
    """Lay sequences end to end instead of padding them, where the model allows it and `attention` is sdpa."""
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


class DeepSpeedEngine(EngineOptions):
    """ZeRO of DeepSpeed: `pip install 'rayrl[deepspeed]'`. The only axis of its layout is `data`."""

    type: Literal["deepspeed"]
    zero_stage: Literal[1, 2, 3] = 2
    """What is divided over the ranks: 1 optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: bool = False
    """Keep master weights and optimizer state in host memory; without effect on CPUs."""


TrainEngineConfig = Annotated[FsdpEngine | DeepSpeedEngine, Field(discriminator="type")]


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
                f"training.parallel.expert_tensor={self.expert_tensor} splits experts over the ranks of "
                f"training.parallel.tensor={self.tensor}: set it to 1, or both to the same number"
            )
        return self


class LoraConfig(Section):
    """Train low-rank adapters instead of the weights: `pip install 'rayrl[lora]'`."""

    r: int = Field(default=16, gt=0)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapters' product counts alpha / r times."""
    target_modules: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get an adapter, by the last part of their names; each must match at least one."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_dropout(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "dropout" not in data:
            return data
        if data["dropout"]:
            raise ValueError(
                f"training.lora.dropout={data['dropout']} would make the logprobs of one and the same weights differ "
                f"from one pass to the next, which ratios and probes rely on; adapters have none: leave it out"
            )
        return {name: value for name, value in data.items() if name != "dropout"}


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
    engine: TrainEngineConfig = FsdpEngine(type="fsdp")
    """Engine."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout."""
    lora: LoraConfig | None = None
    """Adapters; all weights are trained when empty."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate schedule."""
    max_logprob_gap: float | None = Field(default=10.0, gt=0)
    """Mean absolute difference between the logprobs of engines and trainer, in nats per token, above which a step of
    reinforcement learning is a failed one (`driver.max_skipped_steps`): earlier updates were too large, or the engines
    hold other weights. A run that learns is below 0.5. With the engine fsdp such an update is not made. Without limit
    when empty."""
    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Tokens of one forward pass of a rank, padding included; a longer sequence is a micro-batch of its own."""
    cpus_per_worker: float = Field(default=1.0, ge=0)
    """Logical CPUs that Ray reserves for one worker."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """GPUs of one worker; 0 runs on CPU with gloo."""
    threads_per_worker: int = Field(default=1, gt=0)
    """Threads of torch in one worker."""

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        others = {name: value for name, value in self.parallel.model_dump().items() if name != "data" and value > 1}
        if self.engine.type == "deepspeed" and others:
            raise ValueError(
                f"training.engine.type=deepspeed has the axis data only, but training.parallel sets {others}; set them "
                f"to 1, or use training.engine.type=fsdp"
            )
        if self.lora is not None and self.engine.type == "fsdp" and self.engine.sharded_load:
            raise ValueError("training.lora does not go with training.engine.sharded_load=true; set it to false")
        return self
