"""Filters, penalties and scales of rewards in front of the objective."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rayrl.config.base import Section


class CosineRewardConfig(Section):
    """Rewards by length, from a completion of no tokens to one of max_new_tokens, along half a cosine."""

    correct: tuple[float, float] = (1.0, 0.5)
    """Of a correct answer: shortest, longest."""
    wrong: tuple[float, float] = (-1.0, -0.5)
    """Of a wrong one."""


class ShapingConfig(Section):
    """What becomes of rewards and groups before they are trained on."""

    drop_groups_without_signal: bool = False
    """Dynamic sampling: groups whose rewards are all equal are filtered, and others sampled in their place."""
    max_filtered_groups: int = Field(default=1024, gt=0)
    """Groups filtered in a row, after which the run stops: the task is too easy or too hard."""
    filter: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """`module:function` from a `GroupSummary` to True (train on it) or False (filter it); runs in the driver."""
    mask_truncated: bool = False
    """Completions that ended by length carry no loss; their rewards still count in the baseline."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Soft length limit: the last this many tokens below max_new_tokens cost up to `overlong_penalty`; 0 is off."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Taken off the reward of a completion of full length."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Factor of the length penalty; 0 is off. With `linear`, what a completion of max_new_tokens costs."""
    length_penalty_form: Literal["linear", "target", "group"] = "linear"
    """In proportion to the length; to its distance from `length_target`; or by rank within the group (Kimi k1.5)."""
    length_target: int = Field(default=0, ge=0)
    """`target`: the wanted number of sampled tokens."""
    cosine_reward: CosineRewardConfig | None = None
    """Replace the reward by one that depends on correctness and length (Yeo et al. 2025); off when empty."""
    success_threshold: float = 0.5
    """A reward of at least this is a correct answer, for `group` and `cosine_reward`."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Named parts of the reward and their factors: their weighted sum replaces the reward; empty keeps it."""
    reward_parts_scale: Literal["none", "batch", "group"] = "none"
    """Normalise each part of `reward_weights` before it is weighed; `group` is GDPO."""
    reward_normalise: Literal["none", "batch", "group"] = "none"
    """Subtract the mean and divide by the deviation of the training step, or of the group; after penalties."""
    reward_scale: float = Field(default=1.0, gt=0)
    """Factor of rewards, after penalties and normalisation."""
    reward_clip: tuple[float, float] | None = None
    """Bounds of rewards, after scaling; none when empty."""

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.reward_parts_scale != "none" and not self.reward_weights:
            raise ValueError(
                f"reward_parts_scale={self.reward_parts_scale!r} scales the parts that reward_weights names, which is "
                "empty; name them there"
            )
        if self.length_penalty_form == "target" and self.length_penalty > 0 and self.length_target == 0:
            raise ValueError("length_penalty_form='target' needs length_target, in sampled tokens")
        if self.reward_clip is not None and self.reward_clip[0] > self.reward_clip[1]:
            raise ValueError(f"reward_clip={self.reward_clip} has its bounds in the wrong order")
        return self
