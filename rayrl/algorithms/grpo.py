"""GRPO: reward minus the mean reward of the group, scaled by a standard deviation.

Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300. `scale="none"` is Dr. GRPO, arXiv:2503.20783.
"""

from typing import Literal

import torch
from torch import Tensor

from rayrl.algorithms.group_statistics import group_statistics, keep_signal


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale: Literal["group_std", "batch_std", "none"] = "group_std",
    eps: float = 1e-6,
) -> Tensor:
    """Return one advantage per trajectory [N], in the order given.

        A_i = (r_i - mean(group)) / (s + eps)

    with s the Bessel-corrected standard deviation of the group, of all rewards of the batch, or no division at all
    (`none`, `eps` unused). A group of one and a group of equal rewards get exactly 0.

    Args:
        rewards: [N] one scalar reward per trajectory.
        group_ids: [N] int64; trajectories with the same id share a prompt.
        scale: which standard deviation divides. `batch_std` depends on the batch: give the whole one.
        eps: added to the standard deviation.

    A NaN or inf reward makes its own group NaN (with `batch_std` the whole batch).
    """
    statistics = group_statistics(rewards, group_ids)
    centred = statistics.rewards - statistics.mean
    if scale == "none":
        return keep_signal(centred, statistics, rewards)
    if scale == "group_std":
        return keep_signal(centred / (statistics.std + eps), statistics, rewards)
    if scale == "batch_std":
        deviations = statistics.rewards - statistics.rewards.mean()
        std = (torch.sum(deviations**2) / max(rewards.numel() - 1, 1)).sqrt()
        return keep_signal(centred / (std + eps), statistics, rewards)
    raise ValueError(f"scale: {scale!r} is not one of group_std, batch_std, none")
