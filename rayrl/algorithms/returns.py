"""Discounted returns per token: the sum of the rewards that follow.

Source: Sutton and Barto 2018, section 3.3.
"""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live
from rayrl.algorithms.recurrence import reverse_recurrence, skip_masked


def discounted_returns(token_rewards: Tensor, loss_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return `G_t = r_t + gamma G_next` [N, T] over live tokens, 0 where the mask is 0.

    `next` is the next live token: observations between turns do not discount, and a reward under the mask is lost
    (`rewards_to_tokens` puts it on the last live token).

    Args:
        token_rewards: [N, T].
        loss_mask: [N, T] int or bool.
        gamma: discount per live token.

    NaN in a live position reaches the earlier tokens of its trajectory.
    """
    mask = as_bool(loss_mask)
    rewards = live(token_rewards.detach(), mask)
    return torch.where(mask, reverse_recurrence(rewards, skip_masked(gamma, mask, rewards)), 0.0)
