"""From one reward per trajectory to one per token, with the KL penalty in the reward where it is wanted there."""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live


def rewards_to_tokens(rewards: Tensor, loss_mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Return token rewards [N, T]: the reward on the last live token, `-kl_coef * kl` on each; 0 under the mask.

    Args:
        rewards: [N]; lost for a trajectory without live tokens.
        loss_mask: [N, T] int or bool.
        kl: [N, T] from `kl_estimate`, taken without gradient.
    """
    mask = as_bool(loss_mask)
    order = mask.cumsum(-1)
    is_last = mask & (order == order[:, -1:]) if mask.shape[1] else mask
    values = live(rewards.detach().unsqueeze(1), is_last)
    return values if kl is None else values - kl_coef * live(kl.detach(), mask)


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> Tensor:
    """Return what to add to the rewards [N]: 0 up to `max_tokens - buffer_tokens`, then linear to `-penalty`.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, soft overlong punishment.

    Args:
        lengths: [N] sampled tokens per trajectory.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens: {buffer_tokens} must be in 1 .. max_tokens ({max_tokens})")
    excess = (lengths - (max_tokens - buffer_tokens)).to(torch.float32) / buffer_tokens
    return -penalty * excess.clamp(0, 1)
