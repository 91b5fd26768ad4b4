"""Lengths, several rewards and scales: what is done to rewards before advantages."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.algorithms import (
    combine_rewards,
    cosine_length_reward,
    group_length_penalty,
    grpo_advantages,
    linear_length_penalty,
    normalise_rewards,
    target_length_penalty,
)

torch.set_num_threads(1)
quick = settings(max_examples=25, deadline=None)
LENGTHS = torch.tensor([2, 4, 6, 8])
GROUPS = torch.tensor([5, 5, 5, 9])


def test_linear_and_target_penalties_are_shares_of_the_longest_completion() -> None:
    linear, target = linear_length_penalty(LENGTHS, 8, 0.5), target_length_penalty(LENGTHS, 4, 8)

    torch.testing.assert_close(linear, torch.tensor([-0.125, -0.25, -0.375, -0.5]), rtol=1e-6, atol=0)
    torch.testing.assert_close(target, torch.tensor([-0.25, 0.0, -0.25, -0.5]), rtol=1e-6, atol=0)


def test_group_penalty_pays_short_correct_answers_and_never_pays_wrong_ones() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])

    result = group_length_penalty(rewards, LENGTHS, GROUPS)
    all_wrong = group_length_penalty(torch.zeros(4), LENGTHS, GROUPS)

    torch.testing.assert_close(result, torch.tensor([0.5, 0.0, -0.5, 0.0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(all_wrong, torch.tensor([0.0, 0.0, -0.5, 0.0]), rtol=1e-6, atol=0)


def test_group_penalty_is_nothing_when_lengths_are_equal() -> None:
    assert (group_length_penalty(torch.tensor([1.0, 0.0]), torch.tensor([3, 3]), torch.tensor([1, 1])) == 0).all()


def test_cosine_reward_goes_from_its_first_to_its_last_value_for_each_side() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, math.nan])
    lengths = torch.tensor([0, 4, 99, 0, 8, 1])

    result = cosine_length_reward(rewards, lengths, 8)

    expected = torch.tensor([1.0, 0.75, 0.5, -1.0, -0.5, math.nan])
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("over", ["batch", "group"])
@given(rewards=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=8), scale=st.floats(0.5, 20))
@quick
def test_normalised_rewards_do_not_depend_on_scale_and_shift(over: str, rewards: list[float], scale: float) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.arange(len(rewards)) % 2

    result = normalise_rewards(values, groups, over, eps=0.0)  # type: ignore[arg-type]
    # Powers of two keep equal values equal.
    scaled = normalise_rewards(values * 4, groups, over, eps=0.0)  # type: ignore[arg-type]

    torch.testing.assert_close(scaled, result, rtol=1e-6, atol=1e-6)
    assert torch.isfinite(result).all()


def test_equal_rewards_normalise_to_exactly_zero_by_batch_and_by_group() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7])

    assert (normalise_rewards(torch.full((4,), 0.1), GROUPS, "batch") == 0).all()
    assert normalise_rewards(rewards, GROUPS, "group").tolist() == [0.0, 0.0, 0.0, 0.0]
    assert normalise_rewards(rewards, GROUPS, "none") is rewards


def test_unknown_scale_and_unknown_part_are_refused_with_what_exists() -> None:
    with pytest.raises(ValueError, match=r"'std' is not one of none, batch, group"):
        normalise_rewards(torch.zeros(2), torch.zeros(2, dtype=torch.int64), "std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no reward part is named speed; there are format"):
        combine_rewards({"format": torch.zeros(2)}, {"speed": 1.0}, torch.zeros(2, dtype=torch.int64))


def test_parts_normalised_by_group_keep_apart_what_their_sum_makes_equal() -> None:
    # The example of the paper: (0, 1) and (0, 2) have the same advantages when sums are normalised.
    group = torch.zeros(2, dtype=torch.int64)
    one = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 0.0])}
    two = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 1.0])}
    weights = {"a": 1.0, "b": 1.0}

    by_sum = [grpo_advantages(combine_rewards(parts, weights, group), group, eps=0.0) for parts in (one, two)]
    by_part = [combine_rewards(parts, weights, group, "group", eps=0.0) for parts in (one, two)]

    torch.testing.assert_close(by_sum[0], by_sum[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(by_part[1], 2 * by_part[0], rtol=1e-6, atol=1e-6)
