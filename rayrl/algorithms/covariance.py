"""Clip-Cov and KL-Cov: hold back the few tokens whose update costs the most entropy.

Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
arXiv:2505.22617.
"""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live, live_advantages, safe_mean
from rayrl.algorithms.ppo import clipped_surrogate
from rayrl.algorithms.ratio import exp_ratio, log_ratio


def token_covariance(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return `(log pi - mean)(A - mean)` [N, T] without gradient, means over all live tokens; 0 under the mask."""
    mask = as_bool(loss_mask)
    new, signal = live(logprobs.detach(), mask), live_advantages(advantages, mask)
    return torch.where(mask, (new - safe_mean(new, mask)) * (signal - safe_mean(signal, mask)), 0.0)


def _rank_descending(scores: Tensor) -> Tensor:
    """Return the rank of each entry of a tensor, 0 for the largest, in the same shape."""
    flat = scores.flatten()
    order = flat.argsort(descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(flat.numel(), device=flat.device))
    return ranks.view_as(scores)


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

    The clipped surrogate of `ppo_clip_loss`, and 0 for a random choice of at most `cov_share` of the live tokens
    (at least one), among those with a covariance in [cov_low, cov_high].

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that the step starts from.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool. Means and share are over all tokens given: a micro-batch counts alone.
        generator: source of the choice; None takes the default one of the device.

    NaN in a live position stays NaN, and makes the choice empty.
    """
    mask = as_bool(loss_mask)
    covariance = token_covariance(logprobs, advantages, mask)
    inside = mask & (covariance >= cov_low) & (covariance <= cov_high)
    lottery = torch.rand(mask.shape, generator=generator, device=mask.device)
    chosen = inside & (_rank_descending(torch.where(inside, lottery, -1.0)) < cov_share * mask.sum())
    ratio = exp_ratio(log_ratio(logprobs, old_logprobs, mask))
    losses = clipped_surrogate(ratio, live_advantages(advantages, mask), clip_low, clip_high)
    return torch.where(chosen, 0.0, losses)


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cov_share: float = 2e-4,
    cov_kl_coef: float = 1.0,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        loss = -A r,   plus cov_kl_coef |log r| for the share of live tokens with the largest covariance

    At least one token is held back, but none whose covariance is not positive: without signal there is no loss.
    No clip.

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that the step starts from.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool. Means and share are over all tokens given: a micro-batch counts alone.

    NaN in a live position stays NaN.
    """
    mask = as_bool(loss_mask)
    covariance = token_covariance(logprobs, advantages, mask)
    chosen = mask & (covariance > 0) & (_rank_descending(covariance) < cov_share * mask.sum())
    logs = log_ratio(logprobs, old_logprobs, mask)
    losses = -live_advantages(advantages, mask) * exp_ratio(logs)
    return losses + cov_kl_coef * torch.where(chosen, logs.abs(), 0.0)
