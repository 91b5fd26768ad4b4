"""RLOO: reward minus the mean reward of the other members of the group.

Source: Ahmadian et al. 2024, arXiv:2402.14740.
"""

from torch import Tensor

from rayrl.algorithms.group_statistics import group_statistics, keep_signal


def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return one advantage per trajectory [N], in the order given.

        A_i = r_i - mean(r_j for j != i in the group) = n / (n - 1) (r_i - mean(group))

    A group of one has no baseline and gets 0, as does a group of equal rewards. The advantages of a group sum to zero
    up to rounding.

    Args:
        rewards: [N] one scalar reward per trajectory.
        group_ids: [N] int64; trajectories with the same id share a prompt.

    A NaN or inf reward makes its own group NaN.
    """
    statistics = group_statistics(rewards, group_ids)
    factor = statistics.size / (statistics.size - 1).clamp(min=1)
    return keep_signal(factor * (statistics.rewards - statistics.mean), statistics, rewards)
