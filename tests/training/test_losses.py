"""From the config of an algorithm to the loss of a micro-batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import make_engine, random_batch

from rayrl.algorithms.rloo import rloo_advantages
from rayrl.config.algorithm import AlgorithmConfig, ImportanceConfig, KLConfig
from rayrl.training.losses import LossView, PolicyLoss, SupervisedLoss, batch_advantages, objective_settings


def _view(**changes: torch.Tensor | None) -> LossView:
    values: dict[str, torch.Tensor | None] = {
        "logprobs": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], requires_grad=True),
        "entropy": None,
        "sampler_logprobs": torch.tensor([[-1.5, -2.0], [-2.5, 0.0]]),
        "proximal_logprobs": None,
        "ref_logprobs": None,
        "advantages": torch.tensor([[1.0], [-1.0]]),
        "loss_mask": torch.tensor([[True, True], [True, False]]),
    }
    return LossView(**(values | changes))  # type: ignore[arg-type]


def test_without_proximal_logprobs_the_ratio_is_one_and_the_gradient_is_not_zero() -> None:
    view = _view()

    loss, sums = PolicyLoss(AlgorithmConfig(), 16)(view, 3.0)
    loss.backward()

    assert sums["policy/ratio"].item() == pytest.approx(3.0, rel=1e-6)
    assert view.logprobs.grad is not None
    assert view.logprobs.grad[0, 0].item() != 0


def test_the_sampler_as_centre_takes_the_ratio_to_its_logprobs_and_no_weights() -> None:
    loss_fn = PolicyLoss(AlgorithmConfig(proximal="sampler"), 16)

    _, sums = loss_fn(_view(), 3.0)

    expected = np.exp(0.5) + 1 + np.exp(-0.5)
    assert sums["policy/ratio"].item() == pytest.approx(expected, rel=1e-5)
    assert sums["importance/weight"].item() == pytest.approx(3.0, rel=1e-6)


def test_the_denominator_is_of_tokens_or_of_trajectories_with_a_token() -> None:
    counts = np.asarray([3, 0, 5])

    assert PolicyLoss(AlgorithmConfig(aggregation="token_mean"), 16).denominator(counts) == 8
    assert PolicyLoss(AlgorithmConfig(preset="gspo"), 16).denominator(counts) == 2
    assert SupervisedLoss().denominator(counts) == 8


def test_settings_of_the_config_reach_the_objective() -> None:
    config = AlgorithmConfig(
        preset="cispo", importance=ImportanceConfig(level="geometric", mode="mask", low=0.5), kl=KLConfig(coef=0.1)
    )

    settings = objective_settings(config)

    assert (settings.objective, settings.clip_low, settings.clip_high) == ("cispo", 1.0, 0.28)
    assert (settings.importance_level, settings.importance_mode, settings.importance_low) == ("geometric", "mask", 0.5)
    assert (settings.kl_coef, settings.kl_form) == (0.1, "k3")


def test_advantages_come_from_the_whole_batch() -> None:
    batch = random_batch()

    advantages = batch_advantages(batch, AlgorithmConfig(preset="rloo"))

    expected = rloo_advantages(torch.from_numpy(batch.rewards), torch.from_numpy(batch.group_ids)).numpy()
    of_tokens = np.repeat(expected, np.diff(batch.offsets)) * batch.loss_mask
    np.testing.assert_allclose(advantages, of_tokens, rtol=1e-6, atol=0)


def test_an_entropy_bonus_makes_the_policy_less_certain(llama_folder: Path) -> None:
    batch = random_batch()
    entropies = []
    for coef in (0.0, 5.0):
        engine = make_engine(llama_folder)
        # Both log the entropy; only the second one is paid for it.
        loss_fn = PolicyLoss(AlgorithmConfig(entropy_coef=coef), 16)
        loss_fn.needs_entropy = True
        for _ in range(4):
            result = engine.train_step(batch, loss_fn)
        entropies.append(result.sums["policy/entropy"])

    assert entropies[1] > entropies[0]


def test_advantages_of_distillation_have_the_mean_over_the_step_as_baseline() -> None:
    batch = random_batch()
    rng = np.random.default_rng(0)
    teacher = (rng.normal(size=len(batch.tokens)) * batch.loss_mask).astype(np.float32)

    advantages = batch_advantages(replace(batch, teacher_logprobs=teacher), AlgorithmConfig(preset="distillation"))

    live = batch.loss_mask != 0
    gap = teacher[live] - batch.logprobs[live]
    np.testing.assert_allclose(advantages[live], gap - gap.mean(), rtol=1e-5, atol=1e-5)
    assert not advantages[~live].any()
