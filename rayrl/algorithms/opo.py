"""OPO: the baseline that minimises the variance of the gradient, with lengths in the place of gradient norms.

Source: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585.
"""

from torch import Tensor

from rayrl.algorithms.group_statistics import group_statistics, group_sum, keep_signal


def opo_advantages(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Return one advantage per trajectory [N], in the order given.

        A_i = r_i - sum_j(l_j r_j) / sum_j(l_j)    over the group, i included

    A group of one and a group of equal rewards get exactly 0; so does a group without any live token.

    Args:
        rewards: [N] one scalar reward per trajectory.
        group_ids: [N] int64; trajectories with the same id share a prompt.
        lengths: [N] number of live tokens of each trajectory.

    A NaN or inf reward makes its own group NaN.
    """
    statistics = group_statistics(rewards, group_ids)
    weights = lengths.to(statistics.rewards.dtype)
    total = group_sum(weights, statistics.index)
    baseline = group_sum(weights * statistics.rewards, statistics.index) / total.clamp(min=1)
    return keep_signal((statistics.rewards - baseline).masked_fill(total == 0, 0.0), statistics, rewards)
