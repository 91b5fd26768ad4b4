"""Pass@k: advantages of the reward "at least one of k samples is correct", averaged over all subsets of the group.

Source: Chen et al. 2025, "Pass@k Training for Adaptively Balancing Exploration and Exploitation", arXiv:2508.10751
(the analytical form).
"""

import torch
from torch import Tensor

from rayrl.algorithms.group_statistics import group_statistics, group_sum, keep_signal


def _log_choose(n: Tensor, k: int) -> Tensor:
    """Return log C(n, k), -inf for n < k."""
    inside = n - k
    value = torch.lgamma(n + 1) - torch.lgamma(torch.full_like(n, k + 1)) - torch.lgamma(inside.clamp(min=0) + 1)
    return value.masked_fill(inside < 0, -torch.inf)


def pass_at_k_advantages(rewards: Tensor, group_ids: Tensor, k: int = 4, threshold: float = 0.5) -> Tensor:
    """Return one advantage per trajectory [N], in the order given.

    With n members of which m fail, over all subsets of size k:

        mean   R = 1 - C(m, k) / C(n, k),      std  s = sqrt(R (1 - R))
        correct:  A = (1 - R) / s
        failed:   A = (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / s

    0 for a group smaller than k, of one, of equal rewards, and where every subset passes (s = 0).

    Args:
        rewards: [N]; correct means at least `threshold`.
        group_ids: [N] int64; trajectories with the same id share a prompt.
        k: size of the subsets; 1 is GRPO with the biased standard deviation.

    A NaN reward makes its own group NaN.
    """
    if k < 1:
        raise ValueError(f"k: {k} must be at least 1")
    statistics = group_statistics(rewards, group_ids)
    failed = statistics.rewards < threshold
    num_failed = group_sum(failed.to(statistics.size.dtype), statistics.index)
    none_passes = torch.exp(_log_choose(num_failed, k) - _log_choose(statistics.size.clamp(min=k), k))
    others_fail = torch.exp(
        _log_choose((num_failed - 1).clamp(min=0), k - 1) - _log_choose((statistics.size - 1).clamp(min=k - 1), k - 1)
    )
    spread = (none_passes * (1 - none_passes)).sqrt()
    advantages = torch.where(failed, none_passes - others_fail, none_passes)
    usable = (statistics.size >= k) & (spread > 0)
    advantages = torch.where(usable, advantages / torch.where(usable, spread, 1.0), 0.0)
    # Comparisons turn a NaN reward into a plain "passed".
    return keep_signal(torch.where(statistics.mean.isnan(), torch.nan, advantages), statistics, rewards)
