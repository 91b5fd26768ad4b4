"""REINFORCE: advantage times log-probability, without ratio or clip.

Sources: Williams 1992; for language models with group advantages GPG, Chu et al. 2025, arXiv:2504.02546.
"""

from torch import Tensor

from rayrl.algorithms.masking import as_bool, live, live_advantages


def reinforce_loss(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return `-A log pi` per token [N, T], 0 where the mask is 0.

    On-policy its gradient is the one of PPO at ratio 1. Off-policy multiply by `importance_weights`.

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool.

    The value is no measure of progress: only its gradient has a meaning. NaN in a live position stays NaN.
    """
    mask = as_bool(loss_mask)
    return -live_advantages(advantages, mask) * live(logprobs, mask)
