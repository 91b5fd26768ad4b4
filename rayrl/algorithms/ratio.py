"""The probability ratio of two policies on the same tokens."""

from typing import Literal

import torch
from torch import Tensor

from rayrl.algorithms.masking import live, safe_mean

MAX_LOG_RATIO = 80.0
"""exp of more than 88 overflows float32, and the derivative of a clipped inf is 0 * inf = NaN. No effect below."""

RatioLevel = Literal["token", "sequence", "geometric"]


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `log pi(token) - log pi_old(token)` [N, T], 0 where the mask is 0.

    The old policy carries no gradient. NaN in a live position stays NaN.
    """
    return live(logprobs, mask) - live(old_logprobs.detach(), mask)


def exp_ratio(log_ratios: Tensor) -> Tensor:
    """Return `exp(log_ratios)`, with the argument held in [-MAX_LOG_RATIO, MAX_LOG_RATIO]."""
    return torch.exp(log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def reduce_log_ratio(log_ratios: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """Return the log ratio at a level, in a shape that broadcasts to [N, T].

        token      [N, T]  log r_t
        sequence   [N, 1]  sum over live t of log r_t: the ratio of the whole trajectory
        geometric  [N, 1]  the mean over live t: the length-normalised ratio

    A trajectory without live tokens has the log ratio 0.
    """
    if level == "token":
        return log_ratios
    if level == "sequence":
        return log_ratios.sum(-1, keepdim=True)
    if level == "geometric":
        return safe_mean(log_ratios, mask, dim=-1)
    raise ValueError(f"level: {level!r} is not one of token, sequence, geometric")
