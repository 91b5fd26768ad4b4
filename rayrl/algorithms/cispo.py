"""CISPO: REINFORCE with a clipped importance weight that carries no gradient; no token loses its gradient.

Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585.
"""

from torch import Tensor

from rayrl.algorithms.masking import as_bool, live, live_advantages
from rayrl.algorithms.ratio import exp_ratio, log_ratio


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        loss = -stop_gradient(clip(pi / pi_old, 1 - clip_low, 1 + clip_high)) A log pi

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that the step starts from.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool.
        clip_low: 1.0 is no lower bound, as in the paper's experiments.

    The value is no measure of progress: only its gradient has a meaning. NaN in a live position stays NaN.
    """
    mask = as_bool(loss_mask)
    ratio = exp_ratio(log_ratio(logprobs.detach(), old_logprobs, mask))
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * live_advantages(advantages, mask) * live(logprobs, mask)
