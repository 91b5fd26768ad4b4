"""The critic: a model with a scalar head that predicts returns, for the advantage `gae`."""

from pydantic import Field

from rayrl.config.base import Section


class CriticConfig(Section):
    """A second model on the training workers, with its own optimizer; the policy's layout and schedule."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the critic; `training.optimizer.lr` when empty."""
    epochs: int = Field(default=1, gt=0)
    """Passes of the critic over the batch of a training step; the policy makes one."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE: 0 trusts the critic for all but the next token, 1 takes whole returns."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per sampled token."""
    warmup_steps: int = Field(default=0, ge=0)
    """First training steps of the run that train the critic alone; the policy's weights are published unchanged."""
    clip: float | None = Field(default=0.2, gt=0)
    """A step may not gain by moving values farther than this from those before it; no clip when empty."""
    whiten: bool = True
    """Bring the advantages of a step to mean 0 and variance 1 over its tokens."""
    path: str | None = None
    """Model folder that the critic starts from, a reward model's export for example; `model.path` when empty."""
