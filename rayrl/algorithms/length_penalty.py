"""Penalties and bonuses for the length of a completion, to be added to its reward."""

import torch
from torch import Tensor

from rayrl.algorithms.group_statistics import group_statistics


def linear_length_penalty(lengths: Tensor, max_tokens: int, coef: float = 1.0) -> Tensor:
    """Return `-coef * l / max_tokens` [N].

    Args:
        lengths: [N] sampled tokens per trajectory.
        max_tokens: longest completion.
    """
    return -coef * lengths.to(torch.float32) / max_tokens


def target_length_penalty(lengths: Tensor, target_tokens: int, max_tokens: int, coef: float = 1.0) -> Tensor:
    """Return `-coef * |l - target_tokens| / max_tokens` [N]: the same for too short and too long.

    Source: Aggarwal and Welleck 2025 (L1, exact form), arXiv:2503.04697; there the target stands in the prompt and the
    factor is one per token.
    """
    return -coef * (lengths.to(torch.float32) - target_tokens).abs() / max_tokens


def group_length_penalty(
    rewards: Tensor, lengths: Tensor, group_ids: Tensor, threshold: float = 0.5, coef: float = 1.0
) -> Tensor:
    """Return the length reward of Kimi k1.5 [N]: short correct ones gain, long ones lose, within a group.

        lambda_i = 1/2 - (l_i - min) / (max - min)      min and max over the lengths of the group
        coef * lambda_i            if r_i >= threshold
        coef * min(0, lambda_i)    otherwise

    A group whose lengths are all equal, and a group of one, get 0.
    Source: Kimi team 2025, arXiv:2501.12599, section 2.3.3.

    Args:
        rewards: [N] before any penalty.
        lengths: [N] sampled tokens per trajectory.
        group_ids: [N] int64; trajectories with the same id share a prompt.
        threshold: a reward of at least this is a correct answer.
    """
    sizes = lengths.to(torch.float64)
    index = group_statistics(sizes, group_ids).index
    if sizes.numel() == 0:
        return sizes.float()
    shortest = sizes.scatter_reduce(0, index, sizes, "amin", include_self=False)[index]
    longest = sizes.scatter_reduce(0, index, sizes, "amax", include_self=False)[index]
    spread = longest - shortest
    gain = torch.where(spread > 0, 0.5 - (sizes - shortest) / spread.clamp(min=1), 0.0)
    return (coef * torch.where(rewards >= threshold, gain, gain.clamp(max=0))).float()


def cosine_length_reward(
    rewards: Tensor,
    lengths: Tensor,
    max_tokens: int,
    threshold: float = 0.5,
    correct: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
) -> Tensor:
    """Return a reward [N] that replaces the given one: from its first value at length 0 to its last at `max_tokens`.

        last + (first - last) (1 + cos(pi l / max_tokens)) / 2

    Short correct answers are worth most, and short wrong ones cost most: a wrong answer should think longer. Longer
    completions than `max_tokens` count as that long. Source: Yeo et al. 2025, arXiv:2502.03373, section 4; their reward
    of exceeding the limit is `overlong_penalty` here.

    Args:
        rewards: [N] one scalar reward per trajectory; only whether it is at least `threshold` matters.
        lengths: [N] sampled tokens per trajectory.
        correct: rewards of a correct answer of length 0 and of `max_tokens`.
        wrong: the same of a wrong one.
    """
    share = (lengths.to(torch.float32) / max_tokens).clamp(0, 1)
    falling = (1 + torch.cos(torch.pi * share)) / 2
    ends = [first_last[1] + (first_last[0] - first_last[1]) * falling for first_last in (correct, wrong)]
    shaped = torch.where(rewards >= threshold, ends[0], ends[1])
    # A reward that is not a number has no side.
    return torch.where(torch.isnan(rewards), rewards.to(shaped.dtype), shaped)
