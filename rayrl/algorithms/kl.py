"""Estimates of KL(pi || pi_ref) from tokens sampled by pi.

Source: Schulman 2020, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html).
"""

from typing import Literal

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live
from rayrl.algorithms.ratio import exp_ratio

KlForm = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    form: KlForm = "k3",
    loss_mask: Tensor | None = None,
    clamp_log_ratio: float | None = None,
    clamp_value: float | None = None,
) -> Tensor:
    """Return per-token estimates [N, T].

        d = log pi - log pi_ref
        k1 = d      k2 = d^2 / 2      k3 = exp(-d) + d - 1      abs = |d|

    k1 and k3 are unbiased as values. As a loss they are not alike: the gradient of k2 is the one of the KL, the
    gradient of k1 has the expectation 0. Unclamped unless asked: other projects clamp d to 20 and k3 to 10.

    Args:
        logprobs: [N, T] of the policy; carries the gradient.
        ref_logprobs: [N, T] of the reference; carries none.
        loss_mask: [N, T] int or bool; where it is 0 the result is 0. None: all tokens are live.
        clamp_log_ratio: holds d in [-c, c].
        clamp_value: holds the result in [-c, c].
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if loss_mask is None else as_bool(loss_mask)
    difference = live(logprobs, mask) - live(ref_logprobs.detach(), mask)
    if clamp_log_ratio is not None:
        difference = difference.clamp(-clamp_log_ratio, clamp_log_ratio)
    if form == "k1":
        estimate = difference
    elif form == "k2":
        estimate = difference**2 / 2
    elif form == "k3":
        estimate = exp_ratio(-difference) + difference - 1
    elif form == "abs":
        estimate = difference.abs()
    else:
        raise ValueError(f"form: {form!r} is not one of k1, k2, k3, abs")
    return estimate if clamp_value is None else estimate.clamp(-clamp_value, clamp_value)
