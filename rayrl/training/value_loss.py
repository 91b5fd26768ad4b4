"""The loss of a critic, and how much of the returns a critic explains."""

import numpy as np
from torch import Tensor

from rayrl.algorithms.value import value_loss
from rayrl.training.batch import FloatArray, IntArray, TrainBatch
from rayrl.training.losses import LossView


class ValueLoss:
    """Half the squared error of the returns, clipped around the values before the step, as a mean over tokens."""

    needs_entropy = False

    def __init__(self, clip: float | None = 0.2) -> None:
        self._clip = clip

    def denominator(self, loss_counts: IntArray) -> float:
        """See `LossFunction`."""
        return float(loss_counts.sum())

    def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossFunction`."""
        assert view.values is not None and view.returns is not None, "a value loss needs a scalar head and returns"
        old = view.values.detach() if view.old_values is None else view.old_values
        token_losses = value_loss(view.values, old, view.returns, view.loss_mask, self._clip)
        total = token_losses.sum()
        return total / denominator, {"num_tokens": view.loss_mask.sum().float(), "critic/loss": total.detach()}


def explained_variance(values: FloatArray, targets: FloatArray, loss_mask: np.ndarray) -> float:
    """Return `1 - Var(targets - values) / Var(targets)` over the loss-carrying tokens; 0 where targets do not vary.

    1 is a perfect critic, 0 one as good as a constant, below 0 one that misleads. All arguments are [sum T].
    """
    live = loss_mask != 0
    known = targets[live].astype(np.float64)
    if known.size == 0 or known.min() == known.max():
        return 0.0
    return float(1 - (known - values[live]).var() / known.var())


def value_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return means of values and returns before the step, and the explained variance of the returns."""
    assert batch.values is not None and batch.returns is not None, "value metrics need a critic"
    live = batch.loss_mask != 0
    return {
        "critic/value_mean": float(batch.values[live].mean()) if live.any() else 0.0,
        "critic/return_mean": float(batch.returns[live].mean()) if live.any() else 0.0,
        "critic/explained_variance": explained_variance(batch.values, batch.returns, batch.loss_mask),
    }
