"""GAE: advantages from a critic, between one-step and full returns.

Source: Schulman et al. 2016, arXiv:1506.02438.
"""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live
from rayrl.algorithms.recurrence import reverse_recurrence, shift_left, skip_masked


def gae(
    token_rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both [N, T] and 0 where the mask is 0; not whitened.

        delta_t = r_t + gamma V_next - V_t,   A_t = delta_t + gamma lam A_next,   G_t = A_t + V_t

    `next` is the next live token: observation tokens neither discount nor bootstrap. Past the last live token value
    and advantage are 0: a truncated answer is treated as finished.

    Args:
        token_rewards: [N, T]; a reward under the mask is lost (`rewards_to_tokens` puts it on a live token).
        values: [N, T] of the critic, before the token is taken.
        loss_mask: [N, T] int or bool.
        gamma, lam: per live token.

    No gradient. NaN in a live position reaches the earlier tokens of its trajectory.
    """
    mask = as_bool(loss_mask)
    rewards = live(token_rewards.detach(), mask)
    baseline = live(values.detach(), mask)
    # The value of the first live token from t on: live tokens restart the recurrence, masked ones pass it through.
    from_here = reverse_recurrence(baseline, skip_masked(0.0, mask, baseline))
    deltas = torch.where(mask, rewards + gamma * shift_left(from_here) - baseline, 0.0)
    advantages = torch.where(mask, reverse_recurrence(deltas, skip_masked(gamma * lam, mask, deltas)), 0.0)
    return advantages, advantages + baseline
