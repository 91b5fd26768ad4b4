"""Dr. GRPO: GRPO without the division by the standard deviation.

Source: Liu et al. 2025, "Understanding R1-Zero-like training", arXiv:2503.20783.
"""

from torch import Tensor

from rayrl.algorithms.grpo import grpo_advantages


def dr_grpo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return `r_i - mean(group)` per trajectory [N]; exactly 0 for a group of one or of equal rewards.

    The paper's objective also needs `aggregate_loss(mode="seq_mean_token_sum_norm")`: a constant length divides,
    instead of the length of each answer. Arguments and non-finite rewards as in `grpo_advantages`.
    """
    return grpo_advantages(rewards, group_ids, scale="none")
