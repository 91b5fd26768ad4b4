"""From the config of an algorithm to the loss of a micro-batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import make_engine, random_batch

from rayrl.algorithms.rloo import rloo_advantages
from rayrl.config.algorithm import AlgorithmConfig, ImportanceConfig, KLConfig
from rayrl.training.batch import TrainBatch
from rayrl.training.losses import (
    LossView,
    PolicyLoss,
    SupervisedLoss,
    assign_advantages,
    batch_advantages,
    objective_settings,
)


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


@pytest.mark.parametrize("student", [[0.5, 0.25, 0.125, 0.125], [0.3, 0.3, 0.2, 0.2]], ids=["fresh", "stale"])
def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_kl_of_the_student(student: list[float]) -> None:
    """Every token as often as the sampler takes it, so that means over the batch are expectations."""
    sampler = torch.tensor([0.5, 0.25, 0.125, 0.125])
    teacher = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    tokens = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    logits = torch.tensor(student).log().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    config = AlgorithmConfig(preset="distillation")
    batch = TrainBatch(
        tokens=_flat(torch.zeros(8), tokens).astype(np.int32),
        loss_mask=_flat(torch.zeros(8), torch.ones(8)).astype(np.uint8),
        logprobs=_flat(torch.zeros(8), sampler.log()[tokens]),
        versions=np.zeros(16, dtype=np.int32),
        offsets=np.arange(0, 17, 2),
        rewards=np.zeros(8, dtype=np.float32),
        group_ids=np.arange(8),
        teacher_logprobs=_flat(torch.zeros(8), teacher[tokens]),
    )

    assigned = assign_advantages(batch, config, _flat(torch.zeros(8), logprobs.detach()[tokens]))
    assert assigned.advantages is not None
    view = _view(
        logprobs=logprobs[tokens][:, None],
        sampler_logprobs=sampler.log()[tokens][:, None],
        advantages=torch.from_numpy(assigned.advantages[1::2])[:, None],
        loss_mask=torch.ones(8, 1, dtype=torch.bool),
    )
    PolicyLoss(config, 16)(view, 8.0)[0].backward()

    exact = torch.tensor(student).log().requires_grad_()
    now = torch.log_softmax(exact, -1)
    (now.exp() * (now - teacher)).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, exact.grad, rtol=1e-4, atol=1e-6)


def _flat(prompt: torch.Tensor, sampled: torch.Tensor) -> np.ndarray:
    """Return [2 N]: of each trajectory one value for its prompt and one for the token that it sampled."""
    pairs: np.ndarray = torch.stack((prompt, sampled.float()), 1).reshape(-1).numpy()
    return pairs
