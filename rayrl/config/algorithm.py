"""The objective: advantages, clipping, corrections, KL. A preset is a name for plain fields."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rayrl.config.base import Section

PRESETS: dict[str, dict[str, Any]] = {
    # Group-normalised advantages with the decoupled PPO objective; DAPO's wider upper clip; no KL.
    "grpo": {
        "advantage": "grpo",
        "advantage_scale": "group_std",
        "objective": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token_mean",
    },
    # Liu et al. 2025: no division by the standard deviation, constant length in the denominator.
    "dr_grpo": {
        "advantage": "grpo",
        "advantage_scale": "none",
        "objective": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "seq_mean_token_sum_norm",
    },
    # Ahmadian et al. 2024: leave-one-out baseline.
    "rloo": {
        "advantage": "rloo",
        "objective": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token_mean",
    },
    # Qwen team 2025: one ratio for the whole sequence, with its very narrow clip.
    "gspo": {
        "advantage": "grpo",
        "advantage_scale": "group_std",
        "objective": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "seq_mean_token_mean",
    },
    # MiniMax 2025: clipped importance weight without gradient, times the logprob.
    "cispo": {
        "advantage": "grpo",
        "advantage_scale": "group_std",
        "objective": "cispo",
        "clip_low": 1.0,
        "clip_high": 0.28,
        "aggregation": "token_mean",
    },
}


class KLConfig(Section):
    """Penalty for leaving the reference policy (the initial model)."""

    coef: float = Field(default=0.0, ge=0)
    """Factor of the KL term in the loss; 0 loads no reference model."""
    form: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator, as in Schulman's note on approximating KL."""


class ImportanceConfig(Section):
    """Weights for the gap between the policy that sampled and the proximal policy (staleness, engine mismatch)."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """One weight per token, or one per sequence (product, or geometric mean)."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Clamp weights to the bounds, or take tokens outside them out of the loss."""
    low: float | None = Field(default=None, ge=0)
    """Lower bound; none when empty."""
    high: float | None = Field(default=2.0, gt=0)
    """Upper bound; none when empty."""


class AlgorithmConfig(Section):
    """A preset fills the fields that are not given; `rayrl check` prints the result."""

    preset: Literal["grpo", "dr_grpo", "rloo", "gspo", "cispo"] = "grpo"
    """Name of a set of values for the fields below."""
    advantage: Literal["grpo", "rloo", "maxrl"] = "grpo"
    """Baseline and scale of the rewards of a group."""
    advantage_scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What GRPO divides by."""
    advantage_eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation (GRPO) or the mean (MaxRL)."""
    objective: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    """Surrogate of the policy gradient."""
    clip_low: float = Field(default=0.2, ge=0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the loss for negative advantages, as a factor; none when empty."""
    proximal: Literal["recompute", "sampler"] = "recompute"
    """Centre of the clip: the trainer's policy before the step (decoupled PPO), or the policy that sampled (PPO)."""
    importance: ImportanceConfig = ImportanceConfig()
    """Correction between sampler and proximal policy; used when proximal is `recompute`."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """How token losses become one number; denominators are those of the whole optimizer step."""
    kl: KLConfig = KLConfig()
    """Penalty towards the reference policy."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Factor of the entropy bonus; costs memory and time when not 0."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        preset = PRESETS.get(data.get("preset", "grpo"), {})
        return {**preset, **data}
