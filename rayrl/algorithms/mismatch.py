"""How far the engine that samples and the trainer are apart, on the same tokens.

Log it whether a correction is on or not: a gap that grows is a bug (temperature, packing, kernels, stale cache).
"""

import torch
from torch import Tensor

from rayrl.algorithms.kl import kl_estimate
from rayrl.algorithms.masking import as_bool
from rayrl.algorithms.ratio import exp_ratio, log_ratio


def mismatch_sums(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor, low: float = 0.5, high: float = 2.0
) -> dict[str, Tensor]:
    """Return sums over live tokens, which add up over micro-batches and ranks; divide by the number of live tokens.

    With r = pi_trainer / pi_sampler per token, and KL(sampler || trainer) as the tokens come from the sampler:
    `mismatch/k1` = -log r, `mismatch/k3` = r - 1 - log r, `mismatch/ratio` = r, `mismatch/abs_logprob_diff` = |log r|,
    `mismatch/out_of_bounds` = 1 where r is outside [low, high].
    """
    with torch.no_grad():
        mask = as_bool(loss_mask)
        logs = log_ratio(trainer_logprobs, sampler_logprobs, mask)
        ratio = exp_ratio(logs)
        return {
            "mismatch/k1": -logs.sum(),
            "mismatch/k3": kl_estimate(sampler_logprobs, trainer_logprobs, "k3", mask).sum(),
            "mismatch/ratio": torch.where(mask, ratio, 0.0).sum(),
            "mismatch/abs_logprob_diff": logs.abs().sum(),
            "mismatch/out_of_bounds": (mask & ((ratio < low) | (ratio > high))).sum().to(logs.dtype),
        }


def mismatch_maxima(trainer_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Return `mismatch/max_ratio` and `mismatch/max_abs_logprob_diff` over the live tokens, 0 for an empty mask."""
    with torch.no_grad():
        mask = as_bool(loss_mask)
        logs = log_ratio(trainer_logprobs, sampler_logprobs, mask)
        if logs.numel() == 0:
            nothing = logs.new_zeros(())
            return {"mismatch/max_ratio": nothing, "mismatch/max_abs_logprob_diff": nothing}
        return {
            "mismatch/max_ratio": torch.where(mask, exp_ratio(logs), 0.0).max(),
            "mismatch/max_abs_logprob_diff": logs.abs().max(),
        }


def mismatch_metrics(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor, low: float = 0.5, high: float = 2.0
) -> dict[str, Tensor]:
    """Return 0-dim means over live tokens of `mismatch_sums`, and `mismatch_maxima`. All are 0 for an empty mask.

    Args:
        trainer_logprobs: [N, T] of the sampled tokens, recomputed by the trainer.
        sampler_logprobs: [N, T] as the engine reported them.
        loss_mask: [N, T] int or bool.
        low, high: the bounds that `out_of_bounds` counts against.
    """
    mask = as_bool(loss_mask)
    num_tokens = mask.sum().clamp(min=1)
    sums = mismatch_sums(trainer_logprobs, sampler_logprobs, mask, low, high)
    means = {name: value / num_tokens for name, value in sums.items()}
    return means | mismatch_maxima(trainer_logprobs, sampler_logprobs, mask)
