"""What the age of the tokens means for the loss: which are too old, and a proximal policy without a forward pass."""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live


def staleness_mask(token_versions: Tensor, loss_mask: Tensor, version: int, max_staleness: int) -> Tensor:
    """Return the loss mask [N, T] bool without the tokens that are older than allowed.

        live and version - token_version <= max_staleness

    Args:
        token_versions: [N, T] int64, the weight version that sampled each token; ignored under the mask.
        loss_mask: [N, T] int or bool.
        version: the version that is trained.
        max_staleness: largest age that stays in the loss; 0 keeps tokens of `version` only.
    """
    if max_staleness < 0:
        raise ValueError(f"max_staleness: {max_staleness} must be at least 0")
    return as_bool(loss_mask) & (version - token_versions <= max_staleness)


def loglinear_proximal(
    logprobs: Tensor, sampler_logprobs: Tensor, token_versions: Tensor, loss_mask: Tensor, version: int
) -> Tensor:
    """Return proximal logprobs [N, T] without gradient, interpolated over the age d of each token; 0 under the mask.

        log pi_prox = log pi_sampler / d + (1 - 1/d) log pi     for d >= 1, and log pi for d = 0

    The older the token, the closer the proximal policy is to the one that is trained; no forward pass is needed.
    Source: the log-linear approximation of AReaL (A-3PO, 2025).

    Args:
        logprobs: [N, T] of the policy that is trained.
        sampler_logprobs: [N, T] as the engine reported them.
        token_versions: [N, T] int64, the weight version that sampled each token.
        loss_mask: [N, T] int or bool.
        version: the version that is trained.
    """
    mask = as_bool(loss_mask)
    current, sampled = live(logprobs.detach(), mask), live(sampler_logprobs.detach(), mask)
    age = torch.where(mask, version - token_versions, 0)
    share = torch.where(age >= 1, 1 / age.clamp(min=1), 0.0).to(current.dtype)
    return current + share * (sampled - current)
