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
    held_back: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        loss = the clipped surrogate of `ppo_clip_loss`, and 0 for the tokens of `clip_cov_held_back`

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that the step starts from.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool.
        held_back: [N, T] int or bool, the tokens without loss, chosen over all tokens of the optimizer step; None:
            chosen among the tokens given, where a micro-batch counts alone.
        generator: source of the choice made here; None takes the default one of the device.

    NaN in a live position stays NaN.
    """
    mask = as_bool(loss_mask)
    if held_back is None:
        held_back = clip_cov_held_back(logprobs, advantages, mask, cov_share, cov_low, cov_high, generator)
    ratio = exp_ratio(log_ratio(logprobs, old_logprobs, mask))
    losses = clipped_surrogate(ratio, live_advantages(advantages, mask), clip_low, clip_high)
    return torch.where(mask & as_bool(held_back), 0.0, losses)


@torch.no_grad()
def clip_cov_held_back(
    logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cov_share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return which tokens Clip-Cov takes out of the loss, [N, T] bool.

    A random choice of at most `cov_share` of the live tokens (at least one), among those with a covariance in
    [cov_low, cov_high]. Means and share are over all tokens given. NaN in a live position makes the choice empty.
    """
    mask = as_bool(loss_mask)
    covariance = token_covariance(logprobs, advantages, mask)
    inside = mask & (covariance >= cov_low) & (covariance <= cov_high)
    lottery = torch.rand(mask.shape, generator=generator, device=mask.device)
    return inside & (_rank_descending(torch.where(inside, lottery, -1.0)) < cov_share * mask.sum())


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cov_share: float = 2e-4,
    cov_kl_coef: float = 1.0,
    held_back: Tensor | None = None,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        loss = -A r,   plus cov_kl_coef |log r| for the tokens of `kl_cov_held_back`; no clip

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that the step starts from.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool.
        held_back: [N, T] int or bool, the tokens with the penalty, chosen over all tokens of the optimizer step; None:
            chosen among the tokens given, where a micro-batch counts alone.

    NaN in a live position stays NaN.
    """
    mask = as_bool(loss_mask)
    if held_back is None:
        held_back = kl_cov_held_back(logprobs, advantages, mask, cov_share)
    logs = log_ratio(logprobs, old_logprobs, mask)
    losses = -live_advantages(advantages, mask) * exp_ratio(logs)
    return losses + cov_kl_coef * torch.where(mask & as_bool(held_back), logs.abs(), 0.0)


@torch.no_grad()
def kl_cov_held_back(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, cov_share: float = 2e-4) -> Tensor:
    """Return which tokens KL-Cov penalises, [N, T] bool: the share of the live tokens with the largest covariance.

    At least one, but none whose covariance is not positive: without signal there is no loss. Means and share are over
    all tokens given.
    """
    mask = as_bool(loss_mask)
    covariance = token_covariance(logprobs, advantages, mask)
    return mask & (covariance > 0) & (_rank_descending(covariance) < cov_share * mask.sum())
