"""Advantages on groups that are ragged, scattered and incomplete, against loops in plain Python."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.algorithms import (
    AdvantageInputs,
    AdvantageSettings,
    adaptive_kl_coef,
    compute_advantages,
    discounted_returns,
    gae,
    gpg_advantages,
    groups_with_signal,
    grpo_advantages,
    masked_whiten,
    maxrl_advantages,
    opo_advantages,
    overlong_penalty,
    pass_at_k_advantages,
    reinforce_pp_baseline_advantages,
    rewards_to_tokens,
    rloo_advantages,
)

quick = settings(max_examples=30, deadline=None)
members = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]), st.integers(0, 3)), min_size=1, max_size=12)

PLAIN: dict[str, tuple[Callable[..., torch.Tensor], Callable[[float, list[float]], float]]] = {
    "grpo": (grpo_advantages, lambda r, group: (r - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)),
    "rloo": (rloo_advantages, lambda r, group: r - (sum(group) - r) / (len(group) - 1)),
    "maxrl": (maxrl_advantages, lambda r, group: (r - statistics.mean(group)) / (statistics.mean(group) + 1e-6)),
}


@pytest.mark.parametrize("name", PLAIN)
@given(samples=members)
@quick
def test_scattered_groups_of_any_size_agree_with_a_plain_loop(name: str, samples: list[tuple[float, int]]) -> None:
    function, formula = PLAIN[name]
    expected = []
    for reward, group_id in samples:
        group = [other for other, identity in samples if identity == group_id]
        expected.append(formula(reward, group) if len(set(group)) > 1 else 0.0)

    result = function(torch.tensor([r for r, _ in samples]), torch.tensor([g for _, g in samples]))

    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_batch_std_is_over_all_rewards_and_the_mean_over_the_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 4.0, 2.0])

    result = grpo_advantages(rewards, torch.tensor([0, 0, 1, 1]), scale="batch_std", eps=0.0)

    expected = torch.tensor([0.5, -0.5, 1.0, -1.0]) / statistics.stdev(rewards.tolist())
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_nan_reward_stays_in_its_group() -> None:
    result = rloo_advantages(torch.tensor([math.nan, 1.0, 0.0, 1.0]), torch.tensor([7, 7, 2, 2]))

    assert result.isnan().tolist() == [True, True, False, False]


def test_empty_batch_gives_an_empty_result() -> None:
    assert grpo_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_integer_rewards_become_floats() -> None:
    assert rloo_advantages(torch.tensor([1, 0]), torch.tensor([0, 0])).tolist() == [1.0, -1.0]


def test_rewards_and_groups_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards and group_ids.*\(3,\).*\(2,\)"):
        grpo_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_opo_weighs_the_baseline_by_length() -> None:
    result = opo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([30, 10]))

    torch.testing.assert_close(result, torch.tensor([0.25, -0.75]), rtol=1e-6, atol=1e-6)


def test_gpg_scales_up_for_the_groups_without_signal() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])

    result = gpg_advantages(rewards, torch.tensor([0, 0, 1, 1, 1, 2, 2, 2]))

    torch.testing.assert_close(result, torch.tensor([1.5, -1.5] + [0.0] * 6), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_correct", "size", "k"), [(1, 4, 2), (2, 6, 3), (3, 5, 1), (1, 3, 3), (4, 5, 2)])
def test_pass_at_k_agrees_with_all_subsets_written_out(num_correct: int, size: int, k: int) -> None:
    rewards = [1.0] * num_correct + [0.0] * (size - num_correct)
    subsets = list(itertools.combinations(range(size), k))
    scores = [max(rewards[i] for i in subset) for subset in subsets]
    mean, spread = statistics.fmean(scores), statistics.pstdev(scores)
    expected = []
    for member in range(size):
        own = [score for subset, score in zip(subsets, scores, strict=True) if member in subset]
        expected.append((statistics.fmean(own) - mean) / spread if spread > 0 else 0.0)

    result = pass_at_k_advantages(torch.tensor(rewards), torch.zeros(size, dtype=torch.int64), k)

    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_pass_at_k_gives_nothing_to_a_group_smaller_than_k() -> None:
    assert pass_at_k_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), k=3).tolist() == [0.0, 0.0]


def test_reinforce_pp_keeps_groups_without_signal_out_of_mean_and_variance() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    groups = torch.tensor([0, 0, 1, 1])

    result = reinforce_pp_baseline_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), groups, mask)

    alone = masked_whiten(torch.tensor([[0.5, 0.5], [-0.5, -0.5]]), mask[:2])
    torch.testing.assert_close(result[:2], alone, rtol=1e-6, atol=1e-6)
    assert (result[2:] == 0).all()


def plain_gae(
    rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    advantages = [0.0] * len(rewards)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = advantages[t] = delta + gamma * lam * next_advantage
            next_value = values[t]
    returns = [a + v if m else 0.0 for a, v, m in zip(advantages, values, mask, strict=True)]
    return advantages, returns


@given(
    rows=st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 1)), min_size=1, max_size=20),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
@quick
def test_gae_agrees_with_a_plain_loop_over_live_tokens(
    rows: list[tuple[float, float, int]], gamma: float, lam: float
) -> None:
    rewards, values, mask = (list(column) for column in zip(*rows, strict=True))
    tensors = [torch.tensor([column], dtype=torch.float64) for column in (rewards, values)]

    result = gae(*tensors, torch.tensor([mask]), gamma, lam)

    expected: Any = plain_gae(rewards, values, mask, gamma, lam)
    for got, want in zip(result, expected, strict=True):
        torch.testing.assert_close(got[0], torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_returns_are_those_of_gae_without_a_critic() -> None:
    rewards, mask = torch.rand(3, 50), torch.rand(3, 50) < 0.7

    result = discounted_returns(rewards, mask, 0.95)

    torch.testing.assert_close(result, gae(rewards, torch.zeros(3, 50), mask, 0.95, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_whitened_values_have_mean_zero_and_variance_one() -> None:
    mask = torch.rand(4, 30) < 0.5

    live = masked_whiten(torch.randn(4, 30) * 7 + 3, mask)[mask]

    assert live.mean().item() == pytest.approx(0, abs=1e-5)
    assert live.var().item() == pytest.approx(1, abs=1e-4)


def test_equal_values_whiten_to_exactly_zero() -> None:
    assert (masked_whiten(torch.full((3, 7), 0.1), torch.ones(3, 7)) == 0).all()


def test_reward_goes_to_the_last_live_token_and_kl_to_all() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]])

    result = rewards_to_tokens(torch.tensor([2.0, 5.0]), mask, kl=torch.ones(2, 4), kl_coef=0.5)

    assert result.tolist() == [[0.0, -0.5, 1.5, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_kl_coefficient_follows_the_target_within_bounds() -> None:
    assert adaptive_kl_coef(1.0, 100.0, 1.0, num_samples=10, horizon=100) == pytest.approx(1.02)
    assert adaptive_kl_coef(1.0, 0.0, 1.0, num_samples=10, horizon=100) == pytest.approx(0.98)


def test_overlong_penalty_grows_linearly_in_the_buffer() -> None:
    result = overlong_penalty(torch.tensor([10, 80, 90, 100, 120]), max_tokens=100, buffer_tokens=20)

    assert result.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_groups_with_signal_are_those_with_two_different_rewards() -> None:
    result = groups_with_signal(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([5, 9, 5, 9, 3]))

    assert result.tolist() == [False, True, False, True, False]


def test_advantage_of_a_name_uses_the_settings_that_it_names() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0]), loss_mask=torch.ones(2, 3)
    )

    advantages, returns = compute_advantages(inputs, AdvantageSettings(advantage="grpo", scale="none"))

    assert advantages.tolist() == [[0.5], [-0.5]]
    assert returns is None


def test_missing_critic_is_named() -> None:
    inputs = AdvantageInputs(rewards=torch.ones(1), group_ids=torch.zeros(1), loss_mask=torch.ones(1, 2))

    with pytest.raises(ValueError, match="gae: needs 'values'"):
        compute_advantages(inputs, AdvantageSettings(advantage="gae"))


def test_unknown_advantage_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'grop' is not one of grpo, .*gae"):
        AdvantageSettings(advantage="grop")
