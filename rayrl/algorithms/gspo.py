"""GSPO: the clipped surrogate with one length-normalised ratio for the whole trajectory.

Source: Zheng et al. 2025 (Qwen), arXiv:2507.18071.
"""

from typing import Literal

from torch import Tensor

from rayrl.algorithms.masking import as_bool, live, live_advantages
from rayrl.algorithms.ppo import clipped_surrogate
from rayrl.algorithms.ratio import exp_ratio, log_ratio, reduce_log_ratio


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ratio_form: Literal["sequence", "token"] = "sequence",
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        s = exp(mean over live t of log pi_t - log pi_old_t)
        loss_t = max(-A_t s, -A_t clip(s, 1 - clip_low, 1 + clip_high))

    The paper's objective is this with `seq_mean_token_mean`. The token form (GSPO-token) has the same value and uses
    `s_t = stop_gradient(s) pi_t / stop_gradient(pi_t)`, so that token t only moves by its own advantage; with one
    advantage per trajectory and a per-sequence mean both have the same gradient.

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T] of the policy that the step starts from.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool; masked tokens do not enter the ratio.
        ratio_form: through what the gradient of the ratio flows.

    NaN in a live position makes its trajectory NaN.
    """
    mask = as_bool(loss_mask)
    log_s = reduce_log_ratio(log_ratio(logprobs, old_logprobs, mask), mask, "geometric")
    if ratio_form == "token":
        own = live(logprobs, mask)
        log_s = log_s.detach() + own - own.detach()
    elif ratio_form != "sequence":
        raise ValueError(f"ratio_form: {ratio_form!r} is not one of sequence, token")
    return clipped_surrogate(exp_ratio(log_s), live_advantages(advantages, mask), clip_low, clip_high)
