"""The whole config of a reinforcement learning run."""

import json
from typing import Self

from pydantic import model_validator

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.checkpoint import CheckpointConfig
from rayrl.config.dataset import DatasetConfig
from rayrl.config.debug import DebugConfig
from rayrl.config.driver import DriverConfig, EvalConfig
from rayrl.config.frozen import TeacherConfig
from rayrl.config.inference import InferenceConfig
from rayrl.config.model import ModelConfig
from rayrl.config.placement import PlacementConfig
from rayrl.config.reward import RewardConfig, WeightedSumReward
from rayrl.config.rollout import NEUTRAL_SAMPLING, RolloutConfig
from rayrl.config.run_file import RunFile, RunSection
from rayrl.config.supervised import PreferenceRunConfig, RewardModelRunConfig, SFTRunConfig, SFTSection
from rayrl.config.supervision import SupervisionConfig
from rayrl.config.tracking import TrackingConfig
from rayrl.config.training import TrainingConfig
from rayrl.config.transfer import TransferConfig

__all__ = [
    "PreferenceRunConfig",
    "RewardModelRunConfig",
    "RunConfig",
    "RunSection",
    "SFTRunConfig",
    "SFTSection",
    "json_schema",
]


def _reward_types(reward: RewardConfig) -> set[str]:
    """Return the type of a reward and of all its terms."""
    if isinstance(reward, WeightedSumReward):
        return {kind for term in reward.terms for kind in _reward_types(term.reward)}
    return {reward.type}


class RunConfig(RunFile):
    """Everything that `rayrl train` needs."""

    model: ModelConfig
    """The model."""
    dataset: DatasetConfig
    """Training prompts."""
    reward: RewardConfig
    """Reward of training."""
    rollout: RolloutConfig
    """Episodes."""
    driver: DriverConfig
    """The loop."""
    training: TrainingConfig
    """Training workers."""
    inference: InferenceConfig
    """Inference engines."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Objective."""
    evaluation: EvalConfig | None = None
    """Evaluation; none when empty."""
    teacher: TeacherConfig | None = None
    """Teacher of the advantage `distillation`; none when empty."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics."""
    placement: PlacementConfig = PlacementConfig()
    """Placement."""
    debug: DebugConfig = DebugConfig()
    """What a run watches of itself."""
    transfer: TransferConfig = TransferConfig()
    """Weight transfer."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Failures of engines and rollout workers."""

    @property
    def samples_per_step(self) -> int:
        """Trajectories in one training step."""
        return self.driver.groups_per_step * self.rollout.group_size

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        refresh = self.algorithm.kl.refresh_every
        if refresh > 0 and self.training.engine.type == "deepspeed":
            raise ValueError(
                f"algorithm.kl.refresh_every={refresh} needs training.engine.type=fsdp: with deepspeed the reference "
                f"stays the model that training started from; set it to 0 or change the engine"
            )
        if refresh > 0 and self.training.lora is not None:
            raise ValueError(
                f"algorithm.kl.refresh_every={refresh} does not go with training.lora: the reference is the model "
                f"without its adapters; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        if self.driver.groups_per_step % self.driver.minibatches:
            raise ValueError(
                f"driver.groups_per_step={self.driver.groups_per_step} is not divisible by "
                f"driver.minibatches={self.driver.minibatches}; change one of them"
            )
        parallel = self.training.parallel
        if self.samples_per_step // self.driver.minibatches < parallel.batch_ranks:
            raise ValueError(
                f"one optimizer step has {self.samples_per_step // self.driver.minibatches} samples for "
                f"training.parallel.data={parallel.data} workers"
                f"{f' x replicate={parallel.replicate}' if parallel.replicate > 1 else ''}; "
                f"every worker needs at least one"
            )
        sampling = self.rollout.sampling
        for name, neutral in NEUTRAL_SAMPLING.items():
            value = sampling.model_dump()[name]
            if value != neutral:
                raise ValueError(
                    f"rollout.sampling.{name}={value} would give logprobs that training cannot reproduce; "
                    f"set it to {neutral} (evaluation.sampling may use it)"
                )
        if sampling.temperature == 0:
            raise ValueError("rollout.sampling.temperature=0 samples no variety to learn from; set it above 0")
        if self.run.deterministic and self.driver.max_staleness > 0:
            raise ValueError(
                f"run.deterministic needs driver.max_staleness=0, not {self.driver.max_staleness}: which version "
                "samples a token would depend on timing"
            )
        if self.run.deterministic and self.inference.engine.type == "vllm":
            raise ValueError("run.deterministic needs inference.engine.type=transformers; vllm rounds batch by batch")
        if self.dataset.type != "reasoning_gym" and "reasoning_gym" in _reward_types(self.reward):
            raise ValueError(
                f"reward.type=reasoning_gym scores problems of dataset.type=reasoning_gym only, but dataset.type="
                f"{self.dataset.type}; use exact_match, regex, math or function"
            )
        context = self.model.max_context
        if context is not None and sampling.max_new_tokens >= context:
            raise ValueError(
                f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in "
                f"model.max_context={context}"
            )
        self._check_cuda_ipc()
        self._check_adapters()
        self._check_engine_abilities()
        if self.placement.mode == "colocated" and self.inference.num_engines != parallel.world_size:
            raise ValueError(
                f"placement.mode=colocated puts one engine beside each training worker, but inference.num_engines="
                f"{self.inference.num_engines} and training.parallel makes {parallel.world_size} workers"
            )
        self._check_engine_counts()
        return self

    def _check_engine_counts(self) -> None:
        count, supervision = self.inference.num_engines, self.supervision
        if supervision.min_engines > count:
            raise ValueError(
                f"supervision.min_engines={supervision.min_engines} is more than inference.num_engines={count}; lower "
                f"the first, or start with more engines (inference.num_engines)"
            )
        if supervision.max_engines is not None and supervision.max_engines < count:
            raise ValueError(
                f"supervision.max_engines={supervision.max_engines} is less than inference.num_engines={count}; raise "
                f"the first to at least {count} or leave it empty (no engines are added then), or lower the second"
            )

    def _check_engine_abilities(self) -> None:
        """Refuse here what an engine would refuse request by request, or only once it has started."""
        gpus = (self.training.gpus_per_worker, self.inference.gpus_per_engine)
        if self.transfer.backend == "nccl" and 0 in gpus:
            raise ValueError(
                f"transfer.backend=nccl needs GPUs on both sides, but training.gpus_per_worker={gpus[0]:g} and "
                f"inference.gpus_per_engine={gpus[1]:g}; use auto or gloo"
            )
        engine = self.inference.engine
        if engine.type == "vllm":
            if engine.sleep_mode and gpus[1] == 0:
                raise ValueError(
                    "inference.engine.sleep_mode=true needs GPUs, but inference.gpus_per_engine=0; leave it out on CPUs"
                )
            return
        sampling = {} if self.evaluation is None else self.evaluation.sampling.model_dump()
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "guided"):
            if sampling.get(name, NEUTRAL_SAMPLING[name]) != NEUTRAL_SAMPLING[name]:
                raise ValueError(
                    f"evaluation.sampling.{name} is set, which inference.engine.type={engine.type} does not do; leave "
                    f"it at {NEUTRAL_SAMPLING[name]}, or use inference.engine.type=vllm"
                )

    def _check_adapters(self) -> None:
        if self.transfer.lora == "merged":
            return
        if self.training.lora is None:
            raise ValueError(
                "transfer.lora=adapters sends the adapters of training.lora, which is not set; set it, or "
                "transfer.lora=merged"
            )
        if self.transfer.backend in ("disk", "cuda_ipc"):
            raise ValueError(
                f"transfer.lora=adapters does not go with transfer.backend={self.transfer.backend}, whose readers take "
                f"whole weights; set transfer.lora=merged or another backend"
            )
        if self.inference.engine.type == "scripted":
            raise ValueError("transfer.lora=adapters needs an engine with weights; set transfer.lora=merged")

    def _check_cuda_ipc(self) -> None:
        if self.transfer.backend != "cuda_ipc":
            return
        gpus = (self.training.gpus_per_worker, self.inference.gpus_per_engine)
        if self.placement.mode != "colocated" or min(gpus) <= 0 or max(gpus) > 1:
            raise ValueError(
                f"transfer.backend=cuda_ipc needs an engine on the same GPU as each training worker, but "
                f"placement.mode={self.placement.mode}, training.gpus_per_worker={gpus[0]:g} and "
                f"inference.gpus_per_engine={gpus[1]:g}; set placement.mode=colocated and both to at most 1 and "
                f"above 0, or another transfer.backend"
            )

    @model_validator(mode="after")
    def _check_other_models(self) -> Self:
        if (self.algorithm.advantage == "distillation") != (self.teacher is not None):
            raise ValueError(
                f"algorithm.advantage={self.algorithm.advantage} and teacher={self.teacher}: distillation needs a "
                "teacher and no other advantage asks one; set algorithm.preset=distillation and teacher.path, or none"
            )
        critic = self.algorithm.critic
        if critic is not None and critic.warmup_steps >= self.driver.num_steps:
            raise ValueError(
                f"algorithm.critic.warmup_steps={critic.warmup_steps} leaves none of driver.num_steps="
                f"{self.driver.num_steps} for the policy"
            )
        return self


def json_schema() -> str:
    """Return the JSON schema of all kinds of config files: the golden file of the tests, and what editors can use."""
    kinds = (RunConfig, SFTRunConfig, PreferenceRunConfig, RewardModelRunConfig)
    return json.dumps({kind.__name__: kind.model_json_schema() for kind in kinds}, indent=1, sort_keys=True)
