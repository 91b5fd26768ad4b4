"""The penalty for leaving a reference policy."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class AdaptiveKLConfig(Section):
    """A coefficient that follows a target (Ziegler et al. 2019); its value is part of checkpoints."""

    target: float = Field(gt=0)
    """KL to the reference that is aimed at, in nats per token, as `policy/ref_kl` shows it."""
    horizon: int = Field(default=10_000, gt=0)
    """Trajectories over which the coefficient may change by a fifth."""


class KLConfig(Section):
    """Penalty for leaving the reference policy (the initial model)."""

    coef: float = Field(default=0.0, ge=0)
    """Factor of the KL term, the first one if it is adaptive; 0 loads no reference model."""
    form: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator, as in Schulman's note on approximating KL."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, by the policy that is trained; or taken off the reward, by the policy that sampled."""
    level: Literal["token", "sequence"] = "sequence"
    """In the reward: the sum over the trajectory off its reward, or each token's share off its own; `token` needs an
    advantage that reads rewards per token."""
    clamp_log_ratio: float | None = Field(default=None, gt=0)
    """Holds the log ratio in [-c, c] before the estimate; none when empty."""
    clamp_value: float | None = Field(default=None, gt=0)
    """Holds the estimate of a token in [-c, c]; none when empty."""
    adaptive: AdaptiveKLConfig | None = None
    """Let the coefficient follow a target; fixed when empty."""
    refresh_every: int = Field(default=0, ge=0)
    """Training steps after which the trained policy becomes the reference; 0 keeps the initial model."""
