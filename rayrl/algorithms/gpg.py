"""GPG: centred rewards, scaled up for the groups of the batch that carry no signal.

Source: Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline", arXiv:2504.02546.
"""

from torch import Tensor

from rayrl.algorithms.group_statistics import group_statistics, keep_signal


def gpg_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return one advantage per trajectory [N], in the order given.

        A_i = (B / B_signal) (r_i - mean(group))

    with B the number of groups in the batch and B_signal the number of those with two different rewards. Used with
    the `reinforce` objective. A group of one and a group of equal rewards get exactly 0.

    Args:
        rewards: [N] one scalar reward per trajectory. The factor depends on the batch: give the whole one.
        group_ids: [N] int64; trajectories with the same id share a prompt.

    A NaN or inf reward makes its own group NaN.
    """
    statistics = group_statistics(rewards, group_ids)
    shares = 1 / statistics.size
    num_groups = shares.sum()
    num_signal = (shares * statistics.has_signal).sum()
    # Shares of 1/3 sum to 0.9999999: rounded, the factor is the exact quotient of two counts.
    factor = num_groups.round() / num_signal.round().clamp(min=1)
    return keep_signal(factor * (statistics.rewards - statistics.mean), statistics, rewards)
