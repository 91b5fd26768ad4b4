"""DPPO: a trust region by an estimate of the divergence of the two distributions, instead of the ratio.

Source: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879
(the binary approximation).
"""

from typing import Literal

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live, live_advantages
from rayrl.algorithms.ratio import exp_ratio


def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    divergence: Literal["tv", "kl"] = "tv",
    divergence_threshold: float = 0.2,
) -> Tensor:
    """Return per-token losses [N, T], 0 where the mask is 0.

        loss = -A r, and 0 where the step leads out: D > threshold and (A > 0 and r > 1, or A < 0 and r < 1)
        tv:  D = |p - q|      kl:  D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    with p = pi(token) and q = pi_old(token): the divergence of "this token or another". A rare token may change its
    ratio a lot, a likely one only little. The ratio is not truncated (other projects cap it at 20).

    Args:
        logprobs: [N, T] of the policy that is trained; the only argument with a gradient.
        old_logprobs: [N, T]; the paper uses the sampler's.
        advantages: [N, T], or [N, 1].
        loss_mask: [N, T] int or bool.

    NaN in a live position stays NaN.
    """
    mask = as_bool(loss_mask)
    signal = live_advantages(advantages, mask)
    new, old = live(logprobs, mask), live(old_logprobs.detach(), mask)
    ratio = exp_ratio(new - old)
    with torch.no_grad():
        p, q = new.exp(), old.exp()
        if divergence == "tv":
            distance = (p - q).abs()
        elif divergence == "kl":
            tiny = torch.finfo(p.dtype).eps
            rest = torch.log((1 - q).clamp(min=tiny)) - torch.log((1 - p).clamp(min=tiny))
            distance = q * (old - new) + (1 - q) * rest
        else:
            raise ValueError(f"divergence: {divergence!r} is not one of tv, kl")
        leads_out = ((signal > 0) & (ratio > 1)) | ((signal < 0) & (ratio < 1))
        dropped = leads_out & (distance > divergence_threshold)
    return torch.where(dropped, 0.0, -signal * ratio)
