"""Importance weights: correct for the gap between the policy that sampled and the one that trains.

Sources: truncated weights (TIS) Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"; masked weights (MIS, IcePop) Ling team 2025; decoupled objective Fu et al. 2025 (AReaL), arXiv:2505.24298.
"""

from typing import Literal

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool
from rayrl.algorithms.ratio import RatioLevel, exp_ratio, log_ratio, reduce_log_ratio

ImportanceMode = Literal["truncate", "mask"]


def importance_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    loss_mask: Tensor,
    level: RatioLevel = "token",
    mode: ImportanceMode = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
) -> Tensor:
    """Return weights [N, T] without gradient, 0 where the mask is 0.

        w = exp(log pi_old - log pi_sampler)    per token, summed over the trajectory, or averaged over it

    `truncate` clips w to [low, high]; `mask` sets w outside [low, high] to 0. A bound of None does not bind;
    truncation without `low` starts at 0. Two stages multiply: `importance_weights(..., level="geometric",
    mode="mask", ...) > 0` as a rejection, times token weights.

    Args:
        old_logprobs: [N, T] by the trainer (the proximal policy).
        sampler_logprobs: [N, T] by the engine, at the version that sampled each token.
        loss_mask: [N, T] int or bool; masked tokens count neither in the sum nor in the mean.

    An infinite ratio is held below `exp(80)`. NaN in a live position stays NaN.
    """
    if low is not None and high is not None and low > high:
        raise ValueError(f"importance bounds: low {low} is above high {high}")
    mask = as_bool(loss_mask)
    ratios = log_ratio(old_logprobs.detach(), sampler_logprobs, mask)
    weights = exp_ratio(reduce_log_ratio(ratios, mask, level)).expand_as(ratios)
    if mode == "truncate":
        if low is not None or high is not None:
            weights = weights.clamp(low, high)
    elif mode == "mask":
        outside = torch.zeros_like(mask)
        if low is not None:
            outside = outside | (weights < low)
        if high is not None:
            outside = outside | (weights > high)
        weights = weights.masked_fill(outside, 0.0)
    else:
        raise ValueError(f"mode: {mode!r} is not one of truncate, mask")
    return torch.where(mask, weights, 0.0)
