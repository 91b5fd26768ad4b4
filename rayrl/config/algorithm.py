"""The objective: advantages, clipping, corrections, KL. A preset is a name for plain fields."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rayrl.config.base import Section
from rayrl.config.critic import CriticConfig
from rayrl.config.kl import KLConfig
from rayrl.config.presets import PRESETS
from rayrl.config.shaping import ShapingConfig

AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "opo",
    "gpg",
    "pass_at_k",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gae",
    "distillation",
]
ObjectiveName = Literal["ppo_clip", "gspo", "cispo", "sapo", "reinforce", "gmpo", "dppo", "m2po", "clip_cov", "kl_cov"]
ProximalName = Literal["recompute", "loglinear", "sampler"]
PresetName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "maxrl",
    "opo",
    "gpg",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "clip_cov",
    "kl_cov",
    "dppo",
    "m2po",
    "ppo",
    "distillation",
]


READ_TOKEN_REWARDS = ("reinforce_pp", "gae")
"""Advantages that are computed from one reward per token; the others read one per trajectory."""


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


class RejectionConfig(Section):
    """A first stage of correction: what leaves the bounds at this level is not trained on at all."""

    level: Literal["token", "sequence", "geometric"] | None = None
    """Level of the ratio between proximal policy and sampler; off when empty."""
    low: float | None = Field(default=None, ge=0)
    """Lower bound; none when empty."""
    high: float | None = Field(default=None, gt=0)
    """Upper bound; none when empty."""


class AlgorithmConfig(Section):
    """A preset fills the fields that are not given; `rayrl check` prints the result."""

    preset: PresetName = "grpo"
    """Name of a set of values for the fields below."""
    advantage: AdvantageName = "grpo"
    """Baseline and scale of the rewards of a group."""
    advantage_scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What `grpo` divides by."""
    advantage_eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation (`grpo`) or the mean (`maxrl`)."""
    objective: ObjectiveName = "ppo_clip"
    """Surrogate of the policy gradient."""
    clip_low: float = Field(default=0.2, ge=0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the loss for negative advantages, as a factor; none when empty."""
    proximal: ProximalName = "recompute"
    """Centre of the clip: the trainer's policy before the step (decoupled PPO); an interpolation between sampler and
    policy by the age of the token, without a forward pass; or the policy that sampled (PPO)."""
    importance: ImportanceConfig = ImportanceConfig()
    """Correction between sampler and proximal policy; not used when proximal is `sampler`."""
    rejection: RejectionConfig = RejectionConfig()
    """A stage in front of that correction; not used when proximal is `sampler`."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """How token losses become one number; denominators are those of the whole optimizer step."""
    kl: KLConfig = KLConfig()
    """Penalty towards the reference policy."""
    critic: CriticConfig | None = None
    """The critic of the advantage `gae`; none when empty."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Factor of the entropy bonus; costs memory and time when not 0."""
    shaping: ShapingConfig = ShapingConfig()
    """Filters, penalties and clips in front of the objective."""
    pass_k: int = Field(default=4, gt=0)
    """`pass_at_k`: size of the subsets of a group."""
    pass_threshold: float = 0.5
    """`pass_at_k`: a reward above this is a success."""
    ratio_form: Literal["sequence", "token"] = "sequence"
    """`gspo`: through what the gradient of the ratio flows."""
    tau_pos: float = Field(default=1.0, gt=0)
    """`sapo`: how fast the gate closes for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0)
    """`sapo`: the same for negative ones."""
    divergence: Literal["tv", "kl"] = "tv"
    """`dppo`: measure of the trust region."""
    divergence_threshold: float = Field(default=0.2, gt=0)
    """`dppo`: radius of the trust region."""
    second_moment: float = Field(default=0.04, gt=0)
    """`m2po`: bound of the mean squared log ratio."""
    cov_share: float = Field(default=2e-4, gt=0, le=1)
    """`clip_cov`, `kl_cov`: share of the live tokens that is held back."""
    cov_low: float = 1.0
    """`clip_cov`: lower end of the covariances that tokens are chosen from."""
    cov_high: float = 5.0
    """`clip_cov`: upper end."""
    cov_kl_coef: float = Field(default=1.0, ge=0)
    """`kl_cov`: factor of the penalty on the chosen tokens."""

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl.place == "reward" and self.kl.level == "token" and self.advantage not in READ_TOKEN_REWARDS:
            raise ValueError(
                f"kl.level='token' puts the penalty into rewards per token, which advantage={self.advantage!r} does "
                f"not read; set kl.level='sequence', or an advantage of {', '.join(READ_TOKEN_REWARDS)}"
            )
        if self.kl.adaptive is not None and self.kl.coef == 0:
            raise ValueError("kl.adaptive needs a kl.coef above 0 to start from")
        if self.kl.refresh_every > 0 and self.kl.coef == 0:
            raise ValueError(f"kl.refresh_every={self.kl.refresh_every} has no reference: kl.coef is 0")
        return self

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        preset = PRESETS.get(data.get("preset", "grpo"), {})
        merged = {**preset, **data}
        for name, values in preset.items():
            if isinstance(values, dict) and isinstance(data.get(name), dict):
                merged[name] = {**values, **data[name]}
        return merged

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        if (self.advantage == "gae") != (self.critic is not None):
            given = "none" if self.critic is None else "one"
            raise ValueError(
                f"advantage {self.advantage!r} with {given} in `critic`: gae needs a critic and no other advantage "
                "takes one; set algorithm.preset=ppo, or algorithm.critic to {} or null"
            )
        return self
