"""Single cases of objectives, corrections, aggregation and reports, worked out by hand."""

import math

import pytest
import torch

from rayrl.algorithms import (
    LossInputs,
    ObjectiveSettings,
    aggregate_loss,
    clip_cov_loss,
    describe_nonfinite,
    dpo_loss,
    dppo_loss,
    gmpo_loss,
    importance_weights,
    ipo_loss,
    kl_cov_loss,
    kl_estimate,
    loglinear_proximal,
    m2po_loss,
    mean_metrics,
    mismatch_metrics,
    nonfinite_report,
    policy_loss,
    ppo_clip_loss,
    staleness_mask,
    token_entropy,
)

ONES = torch.ones(1, 3)


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([ratios]).log()


def inputs(**changes: torch.Tensor | None) -> LossInputs:
    fields: dict[str, torch.Tensor | None] = {
        "logprobs": logs(0.5, 0.5, 0.5),
        "proximal_logprobs": logs(0.5, 0.4, 0.25),
        "sampler_logprobs": logs(0.5, 0.1, 0.25),
        "advantages": torch.ones(1, 1),
        "loss_mask": ONES,
    }
    return LossInputs(**(fields | changes))  # type: ignore[arg-type]


def test_decoupled_loss_is_the_surrogate_times_the_truncated_weight() -> None:
    losses, metrics = policy_loss(inputs(), ObjectiveSettings(clip_low=0.2, clip_high=0.3, importance_high=2.0))

    torch.testing.assert_close(losses, torch.tensor([[-1.0, -1.25 * 2, -1.3]]), rtol=1e-5, atol=1e-6)
    means = mean_metrics(metrics)
    assert means["num_tokens"] == 3
    assert means["policy/clipped_above"] == pytest.approx(1 / 3)
    assert means["importance/weight"] == pytest.approx(4 / 3)
    assert means["mismatch/ratio"] == pytest.approx(6 / 3)


def test_geometric_rejection_removes_the_loss_of_the_whole_trajectory() -> None:
    settings = ObjectiveSettings(rejection_level="geometric", rejection_high=1.1)

    losses, metrics = policy_loss(inputs(), settings)

    assert (losses == 0).all()
    assert metrics["importance/zero"] == 3


def test_kl_and_entropy_are_added_per_token_without_the_importance_weight() -> None:
    settings = ObjectiveSettings(kl_coef=0.5, kl_form="k2", entropy_coef=0.1)
    ref, entropy = logs(0.25, 0.5, 0.5), torch.full((1, 3), 2.0)

    plain, _ = policy_loss(inputs(), ObjectiveSettings())
    full, metrics = policy_loss(inputs(ref_logprobs=ref, entropy=entropy), settings)

    expected = plain + 0.5 * torch.tensor([[math.log(2) ** 2 / 2, 0.0, 0.0]]) - 0.2
    torch.testing.assert_close(full, expected, rtol=1e-5, atol=1e-6)
    assert metrics["policy/entropy"] == 6


@pytest.mark.parametrize("coefficient", ["kl_coef", "entropy_coef"])
def test_coefficient_without_its_input_is_refused(coefficient: str) -> None:
    with pytest.raises(ValueError, match=coefficient):
        policy_loss(inputs(), ObjectiveSettings(**{coefficient: 0.1}))  # type: ignore[arg-type]


def test_unknown_objective_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'ppo' is not one of ppo_clip, .*gmpo"):
        ObjectiveSettings(objective="ppo")


def test_advantages_of_one_dimension_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) does not fit"):
        ppo_clip_loss(torch.zeros(3, 3), torch.zeros(3, 3), torch.ones(3), torch.ones(3, 3))


def test_half_precision_is_computed_in_float32() -> None:
    half = torch.zeros(1, 3, dtype=torch.bfloat16)

    assert ppo_clip_loss(half, half, half, ONES).dtype == torch.float32


def test_gmpo_is_the_geometric_mean_of_the_clipped_ratios() -> None:
    losses = gmpo_loss(logs(0.9, 0.2, 0.3), logs(0.3, 0.2, 0.6), torch.ones(1, 1), ONES, math.log(1.5), math.log(1.5))

    expected = -((1.5 * 1.0 * 0.5) ** (1 / 3))  # for A > 0 only the upper bound binds
    torch.testing.assert_close(losses, torch.full((1, 3), expected), rtol=1e-5, atol=1e-6)


def test_dppo_lets_a_rare_token_move_and_stops_a_likely_one() -> None:
    losses = dppo_loss(logs(0.02, 0.9, 0.3), logs(0.001, 0.6, 0.6), torch.ones(1, 1), ONES, divergence_threshold=0.1)

    torch.testing.assert_close(losses, torch.tensor([[-20.0, 0.0, -0.5]]), rtol=1e-4, atol=1e-5)


def test_m2po_drops_the_fewest_tokens_that_bring_the_second_moment_down() -> None:
    moved = torch.tensor([[1.0, 0.5, 0.1, -2.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0]])

    losses = m2po_loss(moved, torch.zeros(1, 4), advantages, torch.ones(1, 4), second_moment=0.2)

    assert (losses == 0).tolist() == [[True, False, False, True]]


def test_m2po_keeps_tokens_that_come_back_whatever_their_size() -> None:
    losses = m2po_loss(torch.tensor([[3.0, 0.1]]), torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2))

    assert (losses == 0).tolist() == [[False, True]]


def test_kl_cov_penalises_the_token_of_largest_covariance_only() -> None:
    new, old = torch.tensor([[-0.1, -1.0, -2.0]]), torch.tensor([[-0.2, -1.0, -2.2]])
    advantages = torch.tensor([[2.0, 0.0, -1.0]])

    penalty = kl_cov_loss(new, old, advantages, ONES, cov_share=0.1) + advantages * (new - old).exp()

    torch.testing.assert_close(penalty, torch.tensor([[0.1, 0.0, 0.0]]), rtol=1e-5, atol=1e-6)


def test_clip_cov_removes_as_many_tokens_as_the_share_allows_from_the_band() -> None:
    new = torch.linspace(-3, -0.1, 10).unsqueeze(0)
    advantages = torch.linspace(-2, 2, 10).unsqueeze(0)

    losses = clip_cov_loss(new, new, advantages, torch.ones(1, 10), cov_share=0.2, cov_low=0.5, cov_high=99)

    removed = (losses == 0).nonzero()[:, 1].tolist()
    assert len(removed) == 2
    assert set(removed) <= {0, 1, 2, 7, 8, 9}


@pytest.mark.parametrize(
    ("level", "expected"), [("token", [2.0, 0.5, 0.0]), ("sequence", [1.0, 1.0, 0.0]), ("geometric", [1.0, 1.0, 0.0])]
)
def test_weights_at_each_level_ignore_masked_tokens(level: str, expected: list[float]) -> None:
    old, sampler = logs(0.8, 0.2, 0.9), logs(0.4, 0.4, 0.0001)

    weights = importance_weights(old, sampler, torch.tensor([[1, 1, 0]]), level, "truncate", None, None)  # type: ignore[arg-type]

    torch.testing.assert_close(weights, torch.tensor([expected]), rtol=1e-5, atol=1e-6)


def test_truncation_raises_weights_to_the_lower_bound_and_masking_removes_them() -> None:
    old, sampler = logs(0.1, 0.5, 0.9), logs(0.9, 0.5, 0.1)

    truncated = importance_weights(old, sampler, ONES, "token", "truncate", 0.5, 2.0)
    masked = importance_weights(old, sampler, ONES, "token", "mask", 0.5, 2.0)

    torch.testing.assert_close(truncated, torch.tensor([[0.5, 1.0, 2.0]]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(masked, torch.tensor([[0.0, 1.0, 0.0]]), rtol=1e-5, atol=1e-6)


def test_infinite_ratio_is_truncated() -> None:
    weights = importance_weights(torch.zeros(1, 1), torch.full((1, 1), -math.inf), torch.ones(1, 1), high=5.0)

    assert weights.tolist() == [[5.0]]


def test_k1_has_the_sign_of_policy_minus_reference() -> None:
    assert kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), "k1").tolist() == [[2.0]]


def test_clamps_of_the_kl_bound_the_log_ratio_and_the_value() -> None:
    far = torch.tensor([[-50.0]]), torch.tensor([[0.0]])

    assert kl_estimate(*far, "k1", clamp_log_ratio=20.0).item() == -20
    assert kl_estimate(*far, "k3", clamp_value=10.0).item() == 10


def test_aggregations_of_ragged_rows_skip_the_empty_one() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, math.nan, math.nan], [math.nan] * 3])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])

    assert aggregate_loss(losses, mask, "token_mean").item() == 2.5
    assert aggregate_loss(losses, mask, "seq_mean_token_mean").item() == 3.0
    assert aggregate_loss(losses, mask, "seq_mean_token_sum").item() == 5.0
    assert aggregate_loss(losses, mask, "seq_mean_token_sum_norm", max_tokens=10).item() == 0.5


def test_constant_length_aggregation_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        aggregate_loss(ONES, ONES, "seq_mean_token_sum_norm")


def test_mismatch_metrics_of_two_tokens() -> None:
    trainer, sampler = logs(0.6, 0.1, 0.5), logs(0.2, 0.2, 0.001)

    metrics = mismatch_metrics(trainer, sampler, torch.tensor([[1, 1, 0]]), low=0.4, high=2.0)

    expected = {
        "mismatch/ratio": (3 + 0.5) / 2,
        "mismatch/k1": -(math.log(3) + math.log(0.5)) / 2,
        "mismatch/k3": (3 - 1 - math.log(3) + 0.5 - 1 - math.log(0.5)) / 2,
        "mismatch/abs_logprob_diff": (math.log(3) + math.log(2)) / 2,
        "mismatch/out_of_bounds": 0.5,
        "mismatch/max_ratio": 3.0,
        "mismatch/max_abs_logprob_diff": math.log(3),
    }
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected, rel=1e-4)


def test_staleness_is_the_trained_version_minus_the_version_of_the_token() -> None:
    versions = torch.tensor([[7, 6, 5, 4, -1]])

    result = staleness_mask(versions, torch.tensor([[1, 1, 1, 1, 0]]), version=7, max_staleness=2)

    assert result.tolist() == [[True, True, True, False, False]]


def test_proximal_policy_of_older_tokens_is_closer_to_the_trained_one() -> None:
    current, sampler = torch.tensor([[-1.0] * 4]), torch.tensor([[-2.0] * 4])
    versions = torch.tensor([[5, 4, 3, 1]])

    result = loglinear_proximal(current, sampler, versions, torch.ones(1, 4), version=5)

    torch.testing.assert_close(result, torch.tensor([[-1.0, -2.0, -1.5, -1.25]]), rtol=1e-6, atol=1e-6)


def test_nonfinite_values_are_reported_by_name_where_they_are_live() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    counts = nonfinite_report(
        loss_mask=mask,
        logprobs=torch.tensor([[math.nan, 0.0, math.nan], [math.inf, 0.0, 0.0]]),
        advantages=torch.tensor([[1.0], [math.nan]]),
        rewards=torch.tensor([0.0, -math.inf]),
        ref_logprobs=None,
    )

    assert describe_nonfinite(counts) == "logprobs: 1 non-finite, rewards: 1 non-finite"


def test_entropy_of_a_uniform_choice_is_the_log_of_its_size_despite_forbidden_tokens() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf, 0.0]], requires_grad=True)

    entropy = token_entropy(logits)
    entropy.sum().backward()

    assert entropy.item() == pytest.approx(math.log(3), abs=1e-6)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_preference_losses_at_no_preference() -> None:
    zero = torch.zeros(2)

    assert dpo_loss(zero, zero, zero, zero).tolist() == pytest.approx([math.log(2)] * 2)
    assert ipo_loss(zero, zero, zero, zero, beta=0.1).tolist() == pytest.approx([25.0] * 2)
