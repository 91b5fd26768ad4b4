"""Runs on given answers: SFT on one, preference training and reward models on pairs of a better and a worse one."""

from typing import ClassVar, Literal

from pydantic import Field

from rayrl.config.base import Section
from rayrl.config.checkpoint import CheckpointConfig
from rayrl.config.dataset import DatasetConfig
from rayrl.config.driver import DeadlineConfig
from rayrl.config.model import ModelConfig
from rayrl.config.placement import PlacementConfig
from rayrl.config.run_file import RunFile
from rayrl.config.tracking import TrackingConfig
from rayrl.config.training import TrainingConfig


class SupervisedSection(Section):
    """The loop of a run on given answers."""

    num_steps: int = Field(gt=0)
    """Optimizer steps."""
    batch_size: int = Field(gt=0)
    """Examples, or pairs, per step."""
    prompt_format: Literal["chat", "text"] = "chat"
    """As in the single-turn workflow."""
    system_prompt: str | None = None
    """System message in front of chat prompts."""
    deadlines: DeadlineConfig = DeadlineConfig()
    """Deadlines of all waits."""


class SFTSection(SupervisedSection):
    """The supervised loop."""


class PairSection(SupervisedSection):
    """The loop of a run on pairs. A prompt's `answer` is the better one, a field of its row holds the worse one."""

    rejected_field: str = "rejected"
    """Field of the dataset with the worse answer; `dataset.answer_field` names that with the better one."""


class PreferenceSection(PairSection):
    """Preference training of a policy, tied to the model that it starts from."""

    loss: Literal["dpo", "ipo"] = "dpo"
    """Direct preference optimisation, or identity preference optimisation."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the tie to the initial model."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """`dpo`: share of the pairs that are believed to be swapped."""
    average: bool = False
    """`ipo`: mean instead of sum of the logprobs of an answer, as TRL has it."""
    sft_coef: float = Field(default=0.0, ge=0)
    """Factor of the mean negative log-likelihood of the better answer, which the comparison alone lets fall."""


class RewardModelSection(PairSection):
    """A scalar head that learns to score the better answer higher (Bradley-Terry)."""

    center_coef: float = Field(default=0.0, ge=0)
    """Holds the scores around 0, which the comparison alone leaves free."""


class PairEvalConfig(Section):
    """Held-out pairs."""

    dataset: DatasetConfig
    """Held-out prompts with both answers."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    num_pairs: int | None = Field(default=None, gt=0)
    """At most this many pairs, always the same ones; all when empty."""


class SupervisedRunConfig(RunFile):
    """What all runs on given answers have."""

    loop_name: ClassVar[str]
    """Name of the section of the loop."""

    model: ModelConfig
    """The model."""
    dataset: DatasetConfig
    """Prompts with answers."""
    training: TrainingConfig
    """Training workers."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics."""
    placement: PlacementConfig = PlacementConfig()
    """Placement."""

    @property
    def loop(self) -> SupervisedSection:
        """The section of the loop, whatever its name."""
        raise NotImplementedError


class SFTRunConfig(SupervisedRunConfig):
    """Everything that `rayrl sft` needs: the prompts' `answer` is the completion that is learned."""

    loop_name: ClassVar[str] = "sft"

    sft: SFTSection
    """The loop."""

    @property
    def loop(self) -> SFTSection:
        """The section of the loop."""
        return self.sft


class PairRunConfig(SupervisedRunConfig):
    """What all runs on pairs have."""

    evaluation: PairEvalConfig | None = None
    """Held-out pairs; none when empty."""

    @property
    def loop(self) -> PairSection:
        """The section of the loop, whatever its name."""
        raise NotImplementedError


class PreferenceRunConfig(PairRunConfig):
    """Everything that `rayrl preference` needs."""

    loop_name: ClassVar[str] = "preference"

    preference: PreferenceSection
    """The loop and its loss."""

    @property
    def loop(self) -> PreferenceSection:
        """The section of the loop."""
        return self.preference


class RewardModelRunConfig(PairRunConfig):
    """Everything that `rayrl reward-model` needs."""

    loop_name: ClassVar[str] = "reward_model"

    reward_model: RewardModelSection
    """The loop and its loss."""

    @property
    def loop(self) -> RewardModelSection:
        """The section of the loop."""
        return self.reward_model
