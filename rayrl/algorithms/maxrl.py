"""MaxRL: centred rewards over the mean reward: rare successes weigh more, as in maximum likelihood.

Source: Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", arXiv:2602.02710.
"""

from torch import Tensor

from rayrl.algorithms.group_statistics import group_statistics, keep_signal


def maxrl_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Return one advantage per trajectory [N], in the order given.

        A_i = (r_i - mean(group)) / (mean(group) + eps)

    A group of one and a group of equal rewards (all failed, too) get exactly 0.

    Args:
        rewards: [N] non-negative rewards, 1 for success; with negative rewards the mean is no probability, and the
            sign of the advantage can flip.
        group_ids: [N] int64; trajectories with the same id share a prompt.
        eps: added to the mean.

    A NaN or inf reward makes its own group NaN.
    """
    statistics = group_statistics(rewards, group_ids)
    return keep_signal((statistics.rewards - statistics.mean) / (statistics.mean + eps), statistics, rewards)
