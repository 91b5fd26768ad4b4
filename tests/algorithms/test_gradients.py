"""Gradients against finite differences in float64, and against each other where theory says that they agree."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rayrl.algorithms import (
    OBJECTIVES,
    LossInputs,
    ObjectiveSettings,
    aggregate_loss,
    bradley_terry_loss,
    cispo_loss,
    clip_cov_loss,
    dpo_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    importance_weights,
    ipo_loss,
    kl_cov_loss,
    kl_estimate,
    m2po_loss,
    policy_loss,
    ppo_clip_loss,
    reinforce_loss,
    sapo_loss,
    sequence_logprobs,
    sft_loss,
    token_entropy,
    value_loss,
)

MASK = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
RANDOM = torch.Generator().manual_seed(3)
OLD = -torch.rand(3, 5, generator=RANDOM, dtype=torch.float64) * 2 - 0.1
NEW = OLD + torch.randn(3, 5, generator=RANDOM, dtype=torch.float64) * 0.4
ADVANTAGES = torch.randn(3, 5, generator=RANDOM, dtype=torch.float64)

WITH_TRUE_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {
    "ppo": lambda x: ppo_clip_loss(x, OLD, ADVANTAGES, MASK, 0.2, 0.28),
    "ppo with dual clip": lambda x: ppo_clip_loss(x, OLD, 5 * ADVANTAGES, MASK, 0.1, 0.1, dual_clip=1.2),
    "gspo": lambda x: gspo_loss(x, OLD, ADVANTAGES, MASK, 0.05, 0.05),
    "sapo": lambda x: sapo_loss(x, OLD, ADVANTAGES, MASK),
    "reinforce": lambda x: reinforce_loss(x, ADVANTAGES, MASK),
    "gmpo": lambda x: gmpo_loss(x, OLD, ADVANTAGES, MASK, 0.2, 0.2),
    "dppo tv": lambda x: dppo_loss(x, OLD, ADVANTAGES, MASK, "tv", 0.05),
    "dppo kl": lambda x: dppo_loss(x, OLD, ADVANTAGES, MASK, "kl", 0.01),
    "m2po": lambda x: m2po_loss(x, OLD, ADVANTAGES, MASK),
    "kl_cov": lambda x: kl_cov_loss(x, OLD, ADVANTAGES, MASK, cov_share=0.3),
    "clip_cov": lambda x: clip_cov_loss(
        x, OLD, ADVANTAGES, MASK, cov_share=0.3, cov_low=0, generator=torch.Generator().manual_seed(0)
    ),
    "kl k1": lambda x: kl_estimate(x, OLD, "k1", MASK),
    "kl k2": lambda x: kl_estimate(x, OLD, "k2", MASK),
    "kl k3": lambda x: kl_estimate(x, OLD, "k3", MASK),
    "kl abs": lambda x: kl_estimate(x, OLD, "abs", MASK),
    "kl clamped": lambda x: kl_estimate(x, OLD, "k3", MASK, clamp_log_ratio=0.3, clamp_value=0.04),
    "sft": lambda x: sft_loss(x, MASK),
    "value": lambda x: value_loss(x, OLD, ADVANTAGES, MASK, 0.2),
    "value without clip": lambda x: value_loss(x, OLD, ADVANTAGES, MASK, None),
    "entropy": token_entropy,
    "dpo": lambda x: dpo_loss(x[0], x[1], OLD[0], OLD[1], 0.5, label_smoothing=0.1),
    "ipo": lambda x: ipo_loss(x[0], x[1], OLD[0], OLD[1], 0.5),
    "bradley_terry": lambda x: bradley_terry_loss(x[0], x[1], margin=0.2, center_coef=0.01),
    "sequence mean": lambda x: sequence_logprobs(x, MASK, average=True),
    "token mean": lambda x: aggregate_loss(x**2, MASK, "token_mean"),
    "sequence mean of token means": lambda x: aggregate_loss(x**2, MASK, "seq_mean_token_mean"),
    "sequence mean of token sums": lambda x: aggregate_loss(x**2, MASK, "seq_mean_token_sum"),
    "constant length": lambda x: aggregate_loss(x**2, MASK, "seq_mean_token_sum_norm", max_tokens=7),
}


@pytest.mark.parametrize("name", WITH_TRUE_GRADIENT)
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    leaf = NEW.clone().requires_grad_(True)

    assert torch.autograd.gradcheck(WITH_TRUE_GRADIENT[name], (leaf,), eps=1e-6, atol=1e-6, rtol=1e-5)


def gradient(losses: Callable[[Tensor], Tensor], at: Tensor, mode: Any = "seq_mean_token_mean") -> Tensor:
    leaf = at.clone().requires_grad_(True)
    return torch.autograd.grad(aggregate_loss(losses(leaf), MASK, mode), leaf)[0]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_objectives_have_the_gradient_of_reinforce_when_on_policy(name: str) -> None:
    per_sequence = ADVANTAGES[:, :1]

    def losses(x: Tensor) -> Tensor:
        inputs = LossInputs(
            logprobs=x, proximal_logprobs=OLD, sampler_logprobs=OLD, advantages=per_sequence, loss_mask=MASK
        )
        return policy_loss(inputs, ObjectiveSettings(objective=name, cov_low=1e9))[0]

    expected = gradient(lambda x: reinforce_loss(x, per_sequence, MASK), OLD)
    torch.testing.assert_close(gradient(losses, OLD), expected, rtol=1e-9, atol=1e-12)
    assert expected.abs().sum() > 0


def test_both_forms_of_gspo_agree_when_a_trajectory_has_one_advantage() -> None:
    def losses(form: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: gspo_loss(x, OLD, ADVANTAGES[:, :1], MASK, 0.3, 0.3, ratio_form=form)

    by_sequence, by_token = gradient(losses("sequence"), NEW), gradient(losses("token"), NEW)

    torch.testing.assert_close(losses("token")(NEW), losses("sequence")(NEW), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_token, by_sequence, rtol=1e-9, atol=1e-12)


def test_token_form_of_gspo_moves_each_token_by_its_own_advantage() -> None:
    only_first = torch.zeros_like(ADVANTAGES)
    only_first[0, 0] = 1.0

    by_token = gradient(lambda x: gspo_loss(x, OLD, only_first, MASK, 9, 9, ratio_form="token"), NEW)

    assert (by_token != 0).nonzero().tolist() == [[0, 0]]


def test_cispo_ratio_carries_no_gradient() -> None:
    ratio = (NEW - OLD).exp().clamp(0.9, 1.1)

    result = gradient(lambda x: cispo_loss(x, OLD, ADVANTAGES, MASK, 0.1, 0.1), NEW, "token_mean")

    torch.testing.assert_close(result, -ratio * ADVANTAGES * MASK / MASK.sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weights_carry_no_gradient(mode: Any) -> None:
    leaf, other = NEW.clone().requires_grad_(True), OLD.clone().requires_grad_(True)

    assert not importance_weights(leaf, other, MASK, "token", mode, 0.5, 2.0).requires_grad


def test_clipped_token_has_no_gradient_and_others_do() -> None:
    old = torch.zeros(1, 4, dtype=torch.float64)
    new = torch.tensor([[0.5, 0.5, -0.5, -0.5]], dtype=torch.float64).requires_grad_(True)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)

    ppo_clip_loss(new, old, advantages, torch.ones(1, 4)).sum().backward()

    assert new.grad is not None
    assert (new.grad != 0).tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_ratio_beyond_the_range_of_floats_gives_a_finite_gradient(name: str) -> None:
    sampled = torch.tensor([[-200.0, -0.1]])
    leaf = torch.tensor([[-0.1, -200.0]], requires_grad=True)
    inputs = LossInputs(
        logprobs=leaf,
        proximal_logprobs=sampled,
        sampler_logprobs=sampled,
        advantages=torch.tensor([[1.0, 1.0]]),
        loss_mask=torch.ones(1, 2),
    )

    policy_loss(inputs, ObjectiveSettings(objective=name))[0].sum().backward()

    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
