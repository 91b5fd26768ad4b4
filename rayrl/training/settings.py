"""What a training worker is told when it is spawned."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.model import ModelConfig
from rayrl.config.supervised import PreferenceSection, RewardModelSection
from rayrl.config.training import TrainingConfig
from rayrl.config.transfer import TransferConfig

if TYPE_CHECKING:
    from rayrl.infra.collective_recorder import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWorkerSettings:
    """Settings of one training worker; the same for all workers of a run."""

    model: ModelConfig
    """The model; its path must be absolute, since workers have another working directory."""
    training: TrainingConfig
    """Engine, layout, optimizer and schedule."""
    algorithm: AlgorithmConfig | None
    """The objective; None for supervised runs, which have no `train_step`."""
    temperature: float
    """Logits are divided by it, as they were when the tokens were sampled; 1 for supervised runs."""
    minibatches: int
    """Optimizer steps per training step."""
    num_steps: int
    """Optimizer steps of the whole run; the learning rate reaches its end there."""
    max_new_tokens: int
    """Constant length of the aggregation `seq_mean_token_sum_norm`; unused by the others."""
    seed: int
    """Seed of the run."""
    collective_timeout_s: float = 1800.0
    """Seconds that a collective of the training group may take before its ranks give up, slowest rank included."""
    transfer: TransferConfig | None
    """How weights are published; None for supervised runs, which publish none."""
    recording: "Recording | None" = None
    """How collectives are recorded; None does not."""
    deterministic: bool = False
    """Only kernels that give the same bits each time; one that has no such form raises."""

    pairs: PreferenceSection | RewardModelSection | None = None
    """The loss of a run on pairs; None for all others."""

    @property
    def head(self) -> Literal["policy", "scalar"]:
        """What the trained model gives for a token: a reward model gives one number."""
        return "scalar" if isinstance(self.pairs, RewardModelSection) else "policy"

    @property
    def with_reference(self) -> bool:
        """Whether the initial model is kept beside the trained one."""
        by_kl = self.algorithm is not None and self.algorithm.kl.coef > 0
        return by_kl or isinstance(self.pairs, PreferenceSection)

    @property
    def num_policy_steps(self) -> int:
        """Optimizer steps of the policy: all but those in which a critic warms up."""
        critic = None if self.algorithm is None else self.algorithm.critic
        return self.num_steps if critic is None else self.num_steps - critic.warmup_steps * self.minibatches
