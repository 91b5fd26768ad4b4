"""REINFORCE++: returns whitened over the whole batch, with or without the group mean as baseline.

Source: Hu et al. 2025, arXiv:2501.03262.
"""

from torch import Tensor

from rayrl.algorithms.group_statistics import group_statistics, keep_signal
from rayrl.algorithms.masking import as_bool
from rayrl.algorithms.returns import discounted_returns
from rayrl.algorithms.whitening import masked_whiten


def reinforce_pp_advantages(token_rewards: Tensor, loss_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return `masked_whiten(discounted_returns(token_rewards))` [N, T], 0 where the mask is 0.

    No critic and no groups. The penalty for leaving the reference belongs in `token_rewards`. Equal returns give
    exactly 0.

    Args:
        token_rewards: [N, T], usually the reward on the last live token, minus a KL penalty on each.
        loss_mask: [N, T] int or bool. Mean and variance are over the batch: give the whole one.
        gamma: discount per live token.

    NaN in a live position makes all NaN.
    """
    return masked_whiten(discounted_returns(token_rewards, loss_mask, gamma), loss_mask)


def reinforce_pp_baseline_advantages(rewards: Tensor, group_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """Return `masked_whiten(r_i - mean(group))` [N, T], 0 where the mask is 0.

    The trajectory's value stands on each live token, so that longer answers weigh more in mean and variance. Groups
    of one or of equal rewards get exactly 0 and stay out of mean and variance (other projects whiten them too, which
    gives them the advantage -mean/std).

    Args:
        rewards: [N] one scalar reward per trajectory.
        group_ids: [N] int64; trajectories with the same id share a prompt.
        loss_mask: [N, T] int or bool. Mean and variance are over the batch: give the whole one.

    A NaN or inf reward makes the whole batch NaN.
    """
    statistics = group_statistics(rewards, group_ids)
    centred = keep_signal(statistics.rewards - statistics.mean, statistics, rewards)
    mask = as_bool(loss_mask)
    return masked_whiten(centred.unsqueeze(1).expand(mask.shape), mask & statistics.has_signal.unsqueeze(1))
