"""SAPO: a sigmoid gate on the ratio instead of a clip.

Source: Gao et al. 2025 (Qwen), "Soft Adaptive Policy Optimization", arXiv:2511.20347.
"""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live_advantages
from rayrl.algorithms.ratio import exp_ratio, log_ratio


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        loss = -A (4 / tau) sigmoid(tau (r - 1)),   r = pi / pi_old,   tau = tau_pos if A > 0 else tau_neg

    At r = 1 the gradient is the one of PPO; it fades as r leaves 1, faster for a larger tau.

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that the step starts from.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool.

    NaN in a live position stays NaN.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg: {tau_pos} and {tau_neg} must be positive")
    mask = as_bool(loss_mask)
    signal = live_advantages(advantages, mask)
    ratio = exp_ratio(log_ratio(logprobs, old_logprobs, mask))
    tau = torch.where(signal > 0, tau_pos, tau_neg)
    return -signal * 4 / tau * torch.sigmoid(tau * (ratio - 1))
