"""Rewards of different scales made comparable, and several rewards made into one."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rayrl.algorithms.group_statistics import group_statistics

RewardScale = Literal["none", "batch", "group"]


def normalise_rewards(rewards: Tensor, group_ids: Tensor, over: RewardScale = "batch", eps: float = 1e-6) -> Tensor:
    """Return `(r - mean) / (std + eps)` [N], with mean and Bessel-corrected deviation over the batch or the group.

    Equal rewards give exactly 0: all of a batch, or those of a group. `none` returns the rewards.

    Args:
        rewards: [N] one scalar reward per trajectory. A NaN makes its batch, or its group, NaN.
        group_ids: [N] int64; used for `group` only.
        eps: added to the deviation.
    """
    if over == "none":
        return rewards
    if over not in ("batch", "group"):
        raise ValueError(f"over: {over!r} is not one of none, batch, group")
    statistics = group_statistics(rewards, group_ids if over == "group" else torch.zeros_like(group_ids))
    scaled = (statistics.rewards - statistics.mean) / (statistics.std + eps)
    return torch.where(statistics.has_signal, scaled, 0.0).to(rewards.dtype)


def combine_rewards(
    parts: Mapping[str, Tensor],
    weights: Mapping[str, float],
    group_ids: Tensor,
    normalise: RewardScale = "none",
    eps: float = 1e-6,
) -> Tensor:
    """Return the weighted sum of named rewards [N], each normalised for itself before it is weighed.

        r = sum over parts of weight * normalise(part)

    Without normalisation a reward with a large spread drowns the others whatever the weights. With `group` this is
    GDPO (Liu et al. 2026, arXiv:2601.05242): rewards that would give the same sum keep apart.

    Args:
        parts: name -> [N].
        weights: name -> factor; every name must be in `parts`, and parts without a weight are left out.
        group_ids: [N] int64; trajectories with the same id share a prompt.

    Raises:
        ValueError: a weight names no part.
    """
    missing = sorted(set(weights) - set(parts))
    if missing:
        raise ValueError(f"weights: no reward part is named {', '.join(missing)}; there are {', '.join(sorted(parts))}")
    total = torch.zeros(group_ids.shape)
    for name, weight in weights.items():
        total = total + weight * normalise_rewards(parts[name], group_ids, normalise, eps)
    return total
