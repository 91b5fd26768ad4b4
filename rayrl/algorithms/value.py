"""The critic's loss: half the squared error of the return, with a clip around the old value.

Source: Schulman et al. 2017, arXiv:1707.06347, in the form of the OpenAI baselines.
"""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, clip: float | None = 0.2
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        loss = 1/2 max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2)

    Args:
        values: [N, T] of the critic that is trained; the only argument with a gradient.
        old_values: [N, T] of the critic before the step.
        returns: [N, T] from `gae`.
        loss_mask: [N, T] int or bool.
        clip: c; None for the plain squared error.

    NaN in a live position stays NaN.
    """
    mask = as_bool(loss_mask)
    new, target = live(values, mask), live(returns.detach(), mask)
    squared = (new - target) ** 2
    if clip is not None:
        old = live(old_values.detach(), mask)
        squared = torch.maximum(squared, (old + (new - old).clamp(-clip, clip) - target) ** 2)
    return squared / 2
