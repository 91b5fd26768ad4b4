"""PPO: the clipped surrogate, with separate lower and upper bound and optional dual clip.

Sources: Schulman et al. 2017, arXiv:1707.06347; dual clip Ye et al. 2020, arXiv:1912.09729; the higher upper bound
is DAPO, arXiv:2503.14476.
"""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live_advantages
from rayrl.algorithms.ratio import exp_ratio, log_ratio


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`, for A < 0 at most `-A dual_clip`."""
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return losses
    if dual_clip <= 1:
        raise ValueError(f"dual_clip: {dual_clip} must be greater than 1, or None for no dual clip")
    return torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        r = pi / pi_old,   loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    With `dual_clip` c > 1 the loss of a token with A < 0 is at most `-A c`. Decoupled PPO (arXiv:2505.24298) is this
    loss with the proximal policy as `old_logprobs`, times `importance_weights(proximal, sampler, ...)`.

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that the step starts from (decoupled: the proximal policy).
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool.

    NaN under the mask has no effect; in a live position it stays NaN (`nonfinite_report` names it).
    """
    mask = as_bool(loss_mask)
    ratio = exp_ratio(log_ratio(logprobs, old_logprobs, mask))
    return clipped_surrogate(ratio, live_advantages(advantages, mask), clip_low, clip_high, dual_clip)
