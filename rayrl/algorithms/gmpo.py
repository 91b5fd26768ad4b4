"""GMPO: the geometric mean of the token ratios, each clipped in log space.

Source: Zhao et al. 2025, "Geometric-Mean Policy Optimization", arXiv:2507.20673.
"""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live_advantages
from rayrl.algorithms.ratio import exp_ratio, log_ratio, reduce_log_ratio


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        x_t = log pi_t - log pi_old_t,   c_t = clip(x_t, -clip_low, clip_high)
        m_t = min(x_t, c_t) if A_t > 0 else max(x_t, c_t),   loss_t = -A_t exp(mean over live t of m_t)

    The paper's objective is this with `seq_mean_token_mean`. The clip is in log space: 0.4 is a ratio of 0.67 to 1.49.

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that the step starts from.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool; masked tokens do not enter the mean.

    NaN in a live position makes its trajectory NaN.
    """
    mask = as_bool(loss_mask)
    signal = live_advantages(advantages, mask)
    logs = log_ratio(logprobs, old_logprobs, mask)
    clipped = logs.clamp(-clip_low, clip_high)
    pessimistic = torch.where(signal > 0, torch.minimum(logs, clipped), torch.maximum(logs, clipped))
    return -signal * exp_ratio(reduce_log_ratio(pessimistic, mask, "geometric"))
