"""M2PO: drop the fewest tokens that keep the second moment of the log ratio under a bound.

Source: Zheng et al. 2025, "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?",
arXiv:2510.01161.
"""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live_advantages
from rayrl.algorithms.ratio import exp_ratio, log_ratio


def m2po_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    second_moment: float = 0.04,
    held_back: Tensor | None = None,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        loss = -A r, and 0 for the tokens of `m2po_held_back`

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that sampled.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool.
        held_back: [N, T] int or bool, the tokens to drop, chosen over all tokens of the optimizer step; None: chosen
            among the tokens given, which bounds a micro-batch alone.

    NaN in a live position stays NaN.
    """
    mask = as_bool(loss_mask)
    if held_back is None:
        held_back = m2po_held_back(logprobs, old_logprobs, advantages, mask, second_moment)
    losses = -live_advantages(advantages, mask) * exp_ratio(log_ratio(logprobs, old_logprobs, mask))
    return torch.where(mask & as_bool(held_back), 0.0, losses)


@torch.no_grad()
def m2po_held_back(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, second_moment: float = 0.04
) -> Tensor:
    """Return which tokens M2PO drops, [N, T] bool.

    Candidates are the tokens whose step leads away from the old policy (A > 0 and r > 1, or A < 0 and r < 1). Those
    with the largest `(log r)^2` are dropped until the mean of `(log r)^2` over the remaining live tokens is at most
    `second_moment`; if no number of them is enough, all are.

    Args:
        loss_mask: [N, T] int or bool. What is dropped depends on all tokens given.

    The others as in `m2po_loss`. NaN in a live position drops nothing.
    """
    mask = as_bool(loss_mask)
    signal = live_advantages(advantages, mask)
    logs = log_ratio(logprobs, old_logprobs, mask)
    candidate = ((signal > 0) & (logs > 0)) | ((signal < 0) & (logs < 0))
    known = torch.isfinite(logs).all()
    dropped = _largest_until_bounded((logs**2).flatten(), candidate.flatten(), mask.flatten(), second_moment)
    return dropped.view_as(mask) & known


def _largest_until_bounded(moments: Tensor, candidate: Tensor, mask: Tensor, bound: float) -> Tensor:
    """Return which of the flat candidates to drop, largest first; sorted on the device, without a transfer."""
    order = torch.where(candidate, moments, -1.0).argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    sorted_moments = torch.where(candidate, moments, 0.0)[order]
    # Entry k: the mean that remains after the k largest candidates are gone.
    removed = torch.cat([sorted_moments.new_zeros(1), sorted_moments.cumsum(0)])
    num_removed = torch.arange(removed.numel(), device=removed.device)
    num_left = (mask.sum() - num_removed).clamp(min=1)
    num_candidates = candidate.sum()
    enough = ((moments.sum() - removed) / num_left <= bound) & (num_removed <= num_candidates)
    num_dropped = torch.where(enough.any(), enough.int().argmax(), num_candidates)
    return candidate & (rank < num_dropped)
