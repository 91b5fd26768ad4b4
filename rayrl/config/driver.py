"""The loop: batch, staleness, budgets and deadlines."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section
from rayrl.config.dataset import DatasetConfig
from rayrl.config.reward import RewardConfig
from rayrl.config.rollout import SamplingConfig


class DeadlineConfig(Section):
    """How long the driver waits before it says what it waits for and stops. All in seconds."""

    placement_s: float = Field(default=120.0, gt=0)
    """Placement groups: until the cluster has what was asked for."""
    start_s: float = Field(default=300.0, gt=0)
    """Start of an actor, loading its model included."""
    generation_s: float = Field(default=1800.0, gt=0)
    """Until enough groups for the next step are there, counted from the last group that arrived."""
    step_s: float = Field(default=1800.0, gt=0)
    """One training step."""
    publication_s: float = Field(default=300.0, gt=0)
    """Each phase of a publication of weights."""
    checkpoint_s: float = Field(default=600.0, gt=0)
    """Writing or reading one checkpoint."""
    shutdown_s: float = Field(default=30.0, gt=0)
    """Leaving in order; then processes are killed."""


class DriverConfig(Section):
    """Admission, batch forming and the end of the run."""

    groups_per_step: int = Field(gt=0)
    """Groups in one training step (B); samples per step = B * rollout.group_size."""
    num_steps: int = Field(gt=0)
    """Training steps of the whole run."""
    max_staleness: int = Field(default=0, ge=0)
    """Largest age, in versions, that training accepts (eta); 0 is synchronous and on-policy."""
    on_stale: Literal["mask", "drop", "keep"] = "mask"
    """Older tokens: taken out of the loss, the group given back to the dataset, or trained on with a warning."""
    minibatches: int = Field(default=1, gt=0)
    """Optimizer steps per training step; must divide groups_per_step."""
    max_failed_groups: int = Field(default=32, ge=0)
    """Groups in a row without a usable trajectory, after which the run stops."""
    max_skipped_steps: int = Field(default=5, ge=0)
    """Training steps in a row with a loss or gradient that is not finite, or beyond `training.max_logprob_gap`, after
    which the run stops."""
    max_failure_share: float = Field(default=0.5, ge=0, le=1)
    """Share of training steps skipped, or of groups given up, since the start, above which the run stops. It counts
    once there are more than the row's limit of them, and for training steps at the end of the run."""
    deadlines: DeadlineConfig = DeadlineConfig()
    """Deadlines of all waits."""


class EvalConfig(Section):
    """Evaluation on held-out prompts, on one named weight version."""

    dataset: DatasetConfig
    """Held-out prompts."""
    sampling: SamplingConfig
    """Usually temperature 0."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    num_prompts: int | None = Field(default=None, gt=0)
    """At most this many prompts, always the same ones; all when empty."""
    success_threshold: float = 0.99
    """A reward of at least this counts as correct in eval/accuracy."""
    reward: RewardConfig | None = None
    """Another reward for evaluation; the training reward when empty."""
