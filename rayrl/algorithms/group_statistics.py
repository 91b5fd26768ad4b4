"""Sums, means and spreads over the members of each group, wherever the members stand in the batch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Per trajectory, the statistics of the group that it belongs to; float64, so that order hardly matters."""

    rewards: Tensor
    """[N] the rewards themselves."""
    size: Tensor
    """[N] number of members of the group."""
    mean: Tensor
    """[N] mean reward of the group."""
    std: Tensor
    """[N] Bessel-corrected standard deviation; 0 for a group of one."""
    has_signal: Tensor
    """[N] bool: the group has two members with different rewards. Compared on the rewards, because the difference
    of equal float rewards and their mean can be 1e-17, which a tiny standard deviation blows up."""
    index: Tensor
    """[N] int64 dense group number, 0 .. num_groups - 1."""


def group_sum(values: Tensor, index: Tensor) -> Tensor:
    """Return, for each trajectory, the sum of `values` over its group. Both [N]; `index` is dense."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_statistics(rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Return the statistics of each trajectory's group.

    Args:
        rewards: [N] one scalar reward per trajectory.
        group_ids: [N] int64; trajectories with the same id share a prompt. Need not be adjacent, dense or sorted.

    Raises:
        ValueError: the two are not vectors of one length.

    A NaN reward makes the statistics of its own group NaN and has_signal true, so that it is seen.
    """
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards and group_ids: shapes {tuple(rewards.shape)} and {tuple(group_ids.shape)}; "
            "both must be [N], one entry per trajectory"
        )
    values = rewards.detach().double()
    if values.numel() == 0:
        empty = torch.zeros_like(values)
        return GroupStatistics(
            rewards=values, size=empty, mean=empty, std=empty, has_signal=empty.bool(), index=group_ids.long()
        )
    index = torch.unique(group_ids, return_inverse=True)[1]
    size = group_sum(torch.ones_like(values), index)
    mean = group_sum(values, index) / size
    std = (group_sum((values - mean) ** 2, index) / (size - 1).clamp(min=1)).sqrt()
    lowest = values.scatter_reduce(0, index, values, "amin", include_self=False)
    highest = values.scatter_reduce(0, index, values, "amax", include_self=False)
    has_signal = (lowest != highest)[index]
    return GroupStatistics(rewards=values, size=size, mean=mean, std=std, has_signal=has_signal, index=index)


def keep_signal(advantages: Tensor, statistics: GroupStatistics, rewards: Tensor) -> Tensor:
    """Return float64 advantages in the dtype of the rewards, exactly 0 for groups without signal."""
    dtype = rewards.dtype if rewards.dtype.is_floating_point else torch.float32
    return torch.where(statistics.has_signal, advantages, 0.0).to(dtype)


def groups_with_signal(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return per trajectory [N] bool whether its group has two different rewards: what dynamic sampling keeps.

    Arguments and errors as in `group_statistics`.
    """
    return group_statistics(rewards, group_ids).has_signal
