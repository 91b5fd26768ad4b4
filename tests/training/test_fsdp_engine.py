"""Steps that are skipped, the reference policy, proximal logprobs, saving and loading, weights to publish."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from samples import make_engine, random_batch, training_config, weights, write_llama
from torch import Tensor

from rayrl.config.algorithm import AlgorithmConfig, KLConfig
from rayrl.errors import CheckpointError
from rayrl.models.loading import load_causal_lm
from rayrl.training.batch import mask_stale
from rayrl.training.losses import LossView, PolicyLoss, SupervisedLoss


class _NotFiniteLoss(SupervisedLoss):
    """A loss that is finite, but for the calls told."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = super().__call__(view, denominator)
        return loss * self.value, sums


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing_and_says_what_it_was(llama_folder: Path, value: float) -> None:
    engine = make_engine(llama_folder)
    before = weights(engine)

    result = engine.train_step(random_batch(), _NotFiniteLoss(value))

    assert result.skipped
    assert result.reason is not None
    assert result.reason.startswith(f"loss is {value}")
    assert engine.status().optimizer_steps == 0
    for name, tensor in weights(engine).items():
        assert tensor.equal(before[name])


def test_a_gradient_that_is_not_finite_is_named_when_the_loss_is(llama_folder: Path) -> None:
    class InfiniteSlope(SupervisedLoss):
        def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
            loss, sums = super().__call__(view, denominator)
            return (loss - loss.detach()).abs().sqrt() + loss.detach(), sums

    result = make_engine(llama_folder).train_step(random_batch(), InfiniteSlope())

    assert result.skipped
    assert result.reason is not None
    assert result.reason.startswith("gradient norm is nan")
    assert math.isfinite(result.loss)


def test_the_step_after_a_skipped_one_is_as_if_it_had_not_been(llama_folder: Path) -> None:
    batch = random_batch()
    plain, disturbed = make_engine(llama_folder), make_engine(llama_folder)
    disturbed.train_step(batch, _NotFiniteLoss(math.nan))

    for engine in (plain, disturbed):
        assert not engine.train_step(batch, SupervisedLoss()).skipped

    expected = weights(plain)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(disturbed).items())


def test_a_batch_that_is_stale_as_a_whole_is_skipped(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    before = weights(engine)
    batch, _ = mask_stale(random_batch(version=1), version=5, min_version=3)

    result = engine.train_step(batch, PolicyLoss(AlgorithmConfig(), 16))

    assert (result.skipped, result.reason) == (True, "no token of the step carries loss")
    assert all(tensor.equal(before[name]) for name, tensor in weights(engine).items())


def test_masked_tokens_do_not_count_in_the_denominator(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    whole = random_batch(num_groups=2, seed=4)
    half = np.arange(len(whole.tokens)) < whole.offsets[4]
    masked = replace(whole, loss_mask=(whole.loss_mask * half).astype(np.uint8))
    kept = random_batch(num_groups=1, seed=4)

    gradients, expected = engine.gradients(masked, SupervisedLoss()), engine.gradients(kept, SupervisedLoss())

    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped_to_the_global_norm(llama_folder: Path) -> None:
    batch, loss_fn = random_batch(), SupervisedLoss()
    engine = make_engine(llama_folder)
    gradients = engine.gradients(batch, loss_fn)

    result = engine.train_step(batch, loss_fn)

    norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients.values()))
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert result.grad_norm > 1.0
    moment = engine._optimizer.state[engine._weights["model.norm.weight"]]["exp_avg"]
    torch.testing.assert_close(moment, 0.1 * gradients["model.norm.weight"] / norm, rtol=1e-4, atol=1e-7)


def test_given_proximal_logprobs_of_the_same_weights_change_nothing(llama_folder: Path) -> None:
    batch = random_batch()
    engine = make_engine(llama_folder)
    recomputed = replace(batch, proximal_logprobs=engine.forward_logprobs(batch))
    loss_fn = PolicyLoss(AlgorithmConfig(), 16)

    ours, theirs = engine.gradients(batch, loss_fn), engine.gradients(recomputed, loss_fn)

    for name, gradient in ours.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_reference_stays_where_training_started(llama_folder: Path) -> None:
    algorithm = AlgorithmConfig(kl=KLConfig(coef=0.5))
    batch = random_batch(algorithm)
    engine = make_engine(llama_folder, with_reference=True)
    initial = engine.forward_logprobs(batch)
    loss_fn = PolicyLoss(algorithm, 16)

    steps = []
    for _ in range(3):
        reference = engine.forward_logprobs(batch, reference=True)
        np.testing.assert_allclose(reference, initial, rtol=1e-5, atol=1e-6)
        steps.append(engine.train_step(replace(batch, ref_logprobs=reference), loss_fn))

    assert steps[0].sums["policy/ref_kl"] == pytest.approx(0.0, abs=1e-4)
    assert steps[2].sums["policy/ref_kl"] > 1e-3


def test_learning_rate_follows_the_optimizer_steps(llama_folder: Path) -> None:
    config = training_config(lr=0.01)
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"warmup_steps": 4})})
    engine = make_engine(llama_folder, config)

    rates = [engine.train_step(random_batch(), SupervisedLoss()).lr for _ in range(5)]

    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01], rel=1e-9)


def test_supervised_steps_lower_the_loss(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    batch = random_batch()

    losses = [engine.train_step(batch, SupervisedLoss()).loss for _ in range(15)]

    assert losses[-1] < 0.7 * losses[0]


def _steps_after_reload(rank: int, world_size: int, model: str, folder: str) -> dict[str, Any]:
    """Two steps, save, two more; and the same two more after a reload into a fresh engine."""
    config = training_config(data=world_size)
    batch, loss_fn = random_batch(), PolicyLoss(AlgorithmConfig(), 16)

    def two_steps(engine: Any) -> dict[str, Any]:
        results = [engine.train_step(batch, loss_fn) for _ in range(2)]
        return {"weights": weights(engine), "losses": [result.loss for result in results], "random": torch.rand(4)}

    torch.manual_seed(11 + rank)
    engine = make_engine(Path(model), config, rank=rank, world_size=world_size)
    two_steps(engine)
    engine.save(Path(folder))
    expected = two_steps(engine)
    torch.manual_seed(99)
    fresh = make_engine(Path(model), config, rank=rank, world_size=world_size)
    fresh.load(Path(folder))
    return {"expected": expected, "actual": two_steps(fresh), "steps": fresh.status().optimizer_steps}


def _assert_bit_equal(result: dict[str, Any]) -> None:
    expected, actual = result["expected"], result["actual"]
    assert result["steps"] == 4
    assert actual["losses"] == expected["losses"]
    assert actual["random"].equal(expected["random"])
    for name, tensor in expected["weights"].items():
        assert actual["weights"][name].equal(tensor), name


def test_a_run_goes_on_bit_equal_after_save_and_load(llama_folder: Path, tmp_path: Path) -> None:
    _assert_bit_equal(_steps_after_reload(0, 1, str(llama_folder), str(tmp_path / "state")))


@pytest.mark.distributed
def test_two_ranks_go_on_bit_equal_and_one_rank_can_read_their_state(llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "state"

    ranks = run_on_ranks(_steps_after_reload, 2, tmp_path, str(llama_folder), str(folder))
    alone = make_engine(llama_folder)
    alone.load(folder)
    alone_steps = [alone.train_step(random_batch(), PolicyLoss(AlgorithmConfig(), 16)) for _ in range(2)]

    for result in ranks:
        _assert_bit_equal(result)
    assert [step.loss for step in alone_steps] == pytest.approx(ranks[0]["expected"]["losses"], rel=1e-4, abs=1e-6)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(tensor, ranks[0]["expected"]["weights"][name], rtol=1e-4, atol=1e-6)


def test_state_of_another_model_is_refused(llama_folder: Path, untied_folder: Path, tmp_path: Path) -> None:
    make_engine(untied_folder).save(tmp_path / "state")

    with pytest.raises(CheckpointError, match=r"another model.*lm_head"):
        make_engine(llama_folder).load(tmp_path / "state")


def test_state_of_a_model_of_another_size_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    wider = write_llama(tmp_path / "wider", tied=True, intermediate_size=64)
    make_engine(wider).save(tmp_path / "state")

    with pytest.raises(CheckpointError, match="cannot be read"):
        make_engine(llama_folder).load(tmp_path / "state")


def test_a_folder_without_state_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete training state"):
        make_engine(llama_folder).load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_to_publish_are_those_announced_and_tied_ones_come_once(llama_folder: Path, dtype: str) -> None:
    engine = make_engine(llama_folder)
    named = dict(load_causal_lm(llama_folder, dtype=getattr(torch, dtype)).named_parameters())

    specs, tensors = engine.weight_specs(dtype), list(engine.weight_tensors(dtype))

    assert [spec.name for spec in specs] == [name for name, _ in tensors] == list(named)
    assert "lm_head.weight" not in named
    for spec, (name, tensor) in zip(specs, tensors, strict=True):
        assert (spec.shape, spec.dtype) == (tuple(tensor.shape), dtype)
        assert tensor.equal(named[name])


def test_the_exported_folder_gives_the_trained_logprobs(llama_folder: Path, tmp_path: Path) -> None:
    engine = make_engine(llama_folder)
    engine.train_step(random_batch(), SupervisedLoss())

    engine.export_hf(tmp_path / "export")

    exported = make_engine(tmp_path / "export")
    batch = random_batch()
    assert exported.forward_logprobs(batch).tolist() == engine.forward_logprobs(batch).tolist()
