"""What the algorithm section does to a step of a worker: KL, proximal policies, token choices, gap metrics, rewards."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from ranks import run_on_ranks
from samples import make_engine, random_batch, random_groups, training_config, trajectory, weights, worker_settings

from rayrl.algorithms import kl_estimate, select_tokens
from rayrl.config.algorithm import AlgorithmConfig, ImportanceConfig, RejectionConfig
from rayrl.config.kl import AdaptiveKLConfig, KLConfig
from rayrl.config.presets import PRESETS
from rayrl.config.shaping import ShapingConfig
from rayrl.infra.rendezvous import RendezvousAddress
from rayrl.training.batch import TrainBatch, batch_from_arrow
from rayrl.training.kl_reward import penalise_kl
from rayrl.training.losses import LossView, PolicyLoss, batch_advantages
from rayrl.training.policy_batch import prepare_batch
from rayrl.training.shaping import reward_parts
from rayrl.training.step import TrainStepRequest
from rayrl.training.token_columns import columns_mask, to_columns
from rayrl.training.token_selection import choose_tokens
from rayrl.training.worker import TrainWorker
from rayrl.types.arrow import trajectories_to_batch
from rayrl.types.trajectory import FailureRecord

NOT_BY_GROUP = {"ppo", "distillation"}
"""Presets whose advantages come from a critic or a teacher: equal rewards are no absence of signal."""
CHOOSING: dict[str, dict[str, Any]] = {
    "m2po": {"second_moment": 0.05},
    "clip_cov": {"cov_share": 0.2, "cov_low": 0.0, "cov_high": 99.0},
    "kl_cov": {"cov_share": 0.2},
}


def _worker(folder: Path, algorithm: AlgorithmConfig, **overrides: Any) -> TrainWorker:
    worker = TrainWorker(0, 1, worker_settings(folder, algorithm=algorithm, **overrides))
    worker.setup(RendezvousAddress(host="127.0.0.1", port=1))
    return worker


def _step(worker: TrainWorker, *batches: pa.RecordBatch, step: int = 1, **request: Any) -> Mapping[str, float]:
    values = {"version": 3, "min_version": None} | request
    return worker.train_step(TrainStepRequest(step=step, **values), *(batches or random_groups(version=1))).metrics


def _with_reference(logprobs: float) -> TrainBatch:
    """Two trajectories of 3 and 1 sampled tokens in one group, and a reference that is `logprobs` above the sampler."""
    items = [
        trajectory(0, [5, 6], [7, 8, 9], reward=1.0),
        trajectory(0, [5, 6], [7], reward=0.0, sample_index=1),
    ]
    batch, _ = batch_from_arrow([trajectories_to_batch(items)])
    return replace(batch, ref_logprobs=batch.logprobs + np.float32(logprobs))


def test_kl_comes_off_the_reward_of_the_trajectory_when_the_level_is_sequence() -> None:
    batch = _with_reference(-0.5)

    penalised, metrics = penalise_kl(batch, KLConfig(coef=0.1, form="k1", place="reward"))

    np.testing.assert_allclose(penalised.rewards, [1 - 0.1 * 1.5, -0.1 * 0.5], rtol=1e-5, atol=1e-6)
    assert penalised.token_penalties is None
    assert metrics["policy/ref_kl"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["reward/kl_penalty"] == pytest.approx(0.1, rel=1e-5)


def test_kl_reaches_the_advantage_of_each_token_when_the_level_is_token() -> None:
    config = AlgorithmConfig(preset="reinforce_pp", kl=KLConfig(coef=0.1, form="k1", place="reward", level="token"))
    batch = _with_reference(-0.5)

    penalised, _ = penalise_kl(batch, config.kl)
    advantages = batch_advantages(penalised, config)

    assert penalised.rewards.tolist() == batch.rewards.tolist()
    live = advantages[batch.loss_mask != 0]
    # Returns are 0.85, 0.90, 0.95 and -0.05 before they are whitened: what follows a token counts for it.
    assert live[0] < live[1] < live[2]
    assert live[3] < 0


@pytest.mark.parametrize(("form", "clamp"), [("k1", None), ("k2", None), ("k3", None), ("abs", None), ("k3", 0.01)])
def test_kl_in_the_reward_has_every_form_and_its_clamp(form: Any, clamp: float | None) -> None:
    batch = _with_reference(-0.5)

    _, metrics = penalise_kl(batch, KLConfig(coef=0.1, form=form, place="reward", clamp_value=clamp))

    expected = kl_estimate(torch.tensor([[0.0]]), torch.tensor([[-0.5]]), form, None, None, clamp)
    assert metrics["policy/ref_kl"] == pytest.approx(float(expected), rel=1e-4)


def test_kl_in_the_reward_keeps_the_loss_free_of_it_and_follows_the_adapted_coefficient(llama_folder: Path) -> None:
    config = AlgorithmConfig(kl=KLConfig(coef=0.1, form="k1", place="reward", adaptive=AdaptiveKLConfig(target=0.1)))
    worker = _worker(llama_folder, config)

    first = _step(worker, kl_coef=0.1)
    second = _step(_worker(llama_folder, config), kl_coef=0.2)

    assert second["reward/kl_penalty"] == pytest.approx(2 * first["reward/kl_penalty"], rel=1e-5)
    assert (first["policy/kl_coef"], second["policy/kl_coef"]) == (0.1, 0.2)
    assert first["policy/ref_kl"] != pytest.approx(0.0, abs=1e-3), "the sampler of the groups is not the model"


def test_reference_becomes_the_policy_every_so_many_steps_and_after_a_restore(
    llama_folder: Path, tmp_path: Path
) -> None:
    config = AlgorithmConfig(kl=KLConfig(coef=0.1, refresh_every=2))
    worker = _worker(llama_folder, config)

    values = [_step(worker, step=step)["policy/ref_kl"] for step in (1, 2)]
    worker.save(str(tmp_path / "state"))
    values.append(_step(worker, step=3)["policy/ref_kl"])

    restored = _worker(llama_folder, config)
    restored.load(str(tmp_path / "state"))
    assert values[0] == pytest.approx(0.0, abs=1e-6)
    assert values[1] > 1e-3
    assert values[2] == pytest.approx(0.0, abs=1e-6), "the reference is the policy after step 2"
    assert _step(restored, step=3)["policy/ref_kl"] == pytest.approx(0.0, abs=1e-6)


def test_state_without_a_refreshed_reference_brings_the_initial_one_back(llama_folder: Path, tmp_path: Path) -> None:
    config = AlgorithmConfig(kl=KLConfig(coef=0.1, refresh_every=2))
    worker = _worker(llama_folder, config)
    _step(worker, step=1)
    worker.save(str(tmp_path / "state"))
    _step(worker, step=2)

    worker.load(str(tmp_path / "state"))

    assert _step(worker, step=3)["policy/ref_kl"] > 1e-3


def test_interpolated_proximal_policy_lies_between_sampler_and_policy(llama_folder: Path) -> None:
    groups = random_groups(version=1)

    def weight(proximal: Any, version: int) -> float:
        config = AlgorithmConfig(proximal=proximal, importance=ImportanceConfig(high=None))
        return _step(_worker(llama_folder, config), *groups, version=version)["importance/weight"]

    recomputed = weight("recompute", 3)
    # Age 1: the sampler itself, so all weights are 1. Older: nearer to the policy and the recomputed weights.
    assert weight("loglinear", 2) == pytest.approx(1.0, rel=1e-5)
    young, old = weight("loglinear", 3), weight("loglinear", 101)
    assert abs(old - recomputed) < abs(young - recomputed)
    assert weight("loglinear", 1) == pytest.approx(recomputed, rel=1e-4)


@pytest.mark.parametrize("proximal", ["recompute", "loglinear", "sampler"])
@pytest.mark.parametrize("high", [None, 2.0])
def test_gap_between_sampler_and_trainer_is_measured_whatever_is_corrected(
    llama_folder: Path, proximal: Any, high: float | None
) -> None:
    algorithm = AlgorithmConfig(proximal=proximal, importance=ImportanceConfig(high=high))
    engine = make_engine(llama_folder)
    batch, _ = batch_from_arrow(random_groups(version=1))
    gap = np.abs(engine.forward_logprobs(batch) - batch.logprobs)[batch.loss_mask != 0]

    metrics = _step(_worker(llama_folder, algorithm), *random_groups(version=1))

    assert metrics["mismatch/abs_logprob_diff"] == pytest.approx(float(gap.mean()), rel=1e-4)
    assert metrics["mismatch/max_abs_logprob_diff"] == pytest.approx(float(gap.max()), rel=1e-4)
    assert metrics["mismatch/max_ratio"] > metrics["mismatch/ratio"] > 0
    assert {"mismatch/k1", "mismatch/k3", "mismatch/out_of_bounds"} <= metrics.keys()


def test_rejection_by_geometric_mean_goes_before_the_truncation_of_tokens(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    batch, _ = batch_from_arrow(random_groups(version=1))
    mask = columns_mask(batch)
    logs = to_columns(batch, engine.forward_logprobs(batch) - batch.logprobs)
    counts = mask.sum(-1)
    geometric = (logs.sum(-1) / counts).exp()
    bound = float(geometric.median())
    kept = (geometric <= bound)[:, None] & mask
    algorithm = AlgorithmConfig(
        rejection=RejectionConfig(level="geometric", high=bound), importance=ImportanceConfig(high=0.9)
    )

    metrics = _step(_worker(llama_folder, algorithm), *random_groups(version=1))

    expected = torch.where(kept, logs.exp().clamp(max=0.9), 0.0).sum() / mask.sum()
    assert 0 < int(kept.sum()) < int(mask.sum())
    assert metrics["importance/weight"] == pytest.approx(float(expected), rel=1e-4)
    assert metrics["importance/zero"] == pytest.approx(1 - int(kept.sum()) / int(mask.sum()), rel=1e-4)


def _chosen_step(folder: Path, objective: str, budget: int) -> tuple[dict[str, torch.Tensor], TrainBatch]:
    """The gradient of a step on tokens that were chosen over the whole batch, and that batch."""
    engine = make_engine(folder, training_config(micro_batch_tokens=budget))
    algorithm = AlgorithmConfig(preset=objective, proximal="sampler", **CHOOSING[objective])  # type: ignore[arg-type]
    loss_fn = PolicyLoss(algorithm, 16)
    batch = choose_tokens(engine, random_batch(algorithm), loss_fn, seed=3)
    return engine.gradients(batch, loss_fn), batch


@pytest.mark.parametrize("objective", CHOOSING)
def test_objectives_that_choose_tokens_do_not_depend_on_micro_batches(llama_folder: Path, objective: str) -> None:
    whole, batch = _chosen_step(llama_folder, objective, 8192)
    cut, cut_batch = _chosen_step(llama_folder, objective, 24)

    assert batch.held_back is not None
    assert cut_batch.held_back is not None
    num_chosen = int(batch.held_back.sum())
    assert 1 < num_chosen < int((batch.loss_mask != 0).sum())
    assert batch.held_back.tolist() == cut_batch.held_back.tolist()
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6)


def test_tokens_are_chosen_by_the_policy_of_each_optimizer_step(llama_folder: Path) -> None:
    algorithm = AlgorithmConfig(preset="kl_cov", cov_share=0.2)
    engine = make_engine(llama_folder)
    loss_fn = PolicyLoss(algorithm, 16)
    batch = random_batch(algorithm)
    first = choose_tokens(engine, batch, loss_fn, seed=0)
    for _ in range(3):
        engine.train_step(first, loss_fn)

    later = choose_tokens(engine, batch, loss_fn, seed=0)

    assert first.held_back is not None
    assert later.held_back is not None
    assert first.held_back.tolist() != later.held_back.tolist()


def test_held_back_tokens_of_a_step_are_counted_and_others_choose_none(llama_folder: Path) -> None:
    metrics = _step(_worker(llama_folder, AlgorithmConfig(preset="kl_cov", cov_share=0.2)))

    assert metrics["policy/held_back"] == pytest.approx(0.2, abs=0.05)
    assert "policy/held_back" not in _step(_worker(llama_folder, AlgorithmConfig()))


def _gap_on_rank(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    engine = make_engine(
        folder, training_config(data=world_size, micro_batch_tokens=24), rank=rank, world_size=world_size
    )
    result = engine.train_step(random_batch(), PolicyLoss(AlgorithmConfig(), 16))
    return {name: value for name, value in result.sums.items() if name.startswith("mismatch/")}


@pytest.mark.distributed
def test_largest_gap_is_the_same_on_two_ranks_and_many_micro_batches(llama_folder: Path, tmp_path: Path) -> None:
    whole = make_engine(llama_folder).train_step(random_batch(), PolicyLoss(AlgorithmConfig(), 16)).sums

    for sums in run_on_ranks(_gap_on_rank, 2, tmp_path, llama_folder):
        for name, value in sums.items():
            assert value == pytest.approx(whole[name], rel=1e-4), name


def test_input_that_is_not_finite_is_named_in_the_reason_of_a_skipped_step(llama_folder: Path) -> None:
    batch = random_batch()
    logprobs = batch.logprobs.copy()
    logprobs[np.flatnonzero(batch.loss_mask)[:2]] = math.nan

    result = make_engine(llama_folder).train_step(replace(batch, logprobs=logprobs), PolicyLoss(AlgorithmConfig(), 16))

    assert result.skipped
    assert result.reason is not None
    assert "sampler_logprobs: 2 non-finite" in result.reason


def test_step_on_tokens_that_the_trainer_finds_impossible_is_skipped_with_gap_and_setting(llama_folder: Path) -> None:
    batch = random_batch()
    far = replace(batch, logprobs=np.where(batch.loss_mask != 0, np.float32(-300.0), batch.logprobs))
    engine = make_engine(llama_folder)
    before = weights(engine)

    result = engine.train_step(far, PolicyLoss(AlgorithmConfig(), 16))

    assert result.skipped
    assert result.reason is not None
    assert "nats per token apart" in result.reason
    assert "training.max_logprob_gap=10" in result.reason and "training.optimizer.lr" in result.reason
    for name, tensor in weights(engine).items():
        assert tensor.equal(before[name])


def test_garbage_in_positions_without_loss_changes_nothing_in_a_step(llama_folder: Path) -> None:
    batch = random_batch()
    dirty = np.where(batch.loss_mask != 0, batch.logprobs, np.float32(math.nan))
    clean_engine, engine = make_engine(llama_folder), make_engine(llama_folder)

    clean = clean_engine.train_step(batch, PolicyLoss(AlgorithmConfig(), 16))
    result = engine.train_step(replace(batch, logprobs=dirty), PolicyLoss(AlgorithmConfig(), 16))

    assert (result.loss, result.grad_norm) == (clean.loss, clean.grad_norm)
    for name, tensor in weights(engine).items():
        assert tensor.equal(weights(clean_engine)[name])


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - NOT_BY_GROUP))
def test_step_on_equal_rewards_has_exactly_no_gradient(llama_folder: Path, preset: str) -> None:
    items = [trajectory(0, [5, 6], [7, 8 + index], reward=0.3, sample_index=index) for index in range(4)]

    metrics = _step(_worker(llama_folder, AlgorithmConfig(preset=preset)), trajectories_to_batch(items))  # type: ignore[arg-type]

    assert metrics["train/grad_norm"] == 0.0
    assert metrics["policy/advantage"] == 0.0


def test_parts_of_the_reward_are_read_for_usable_trajectories_and_a_missing_one_is_named() -> None:
    failure = FailureRecord(kind="workflow", message="no")
    items = [
        replace(trajectory(0, [5], [7], reward=1.0), reward_parts={"format": 0.5, "answer": 1.0}),
        trajectory(0, [5], [7], failure=failure, sample_index=1),
        replace(trajectory(0, [5], [8], reward=0.0, sample_index=2), reward_parts={"format": 0.25, "answer": 0.0}),
    ]
    batch = trajectories_to_batch(items)

    parts = reward_parts([batch], ("format",))

    assert parts["format"].tolist() == [0.5, 0.25]
    assert json.loads(batch["reward_parts"].to_pylist()[0]) == {"format": 0.5, "answer": 1.0}
    with pytest.raises(ValueError, match=r"reward_weights names speed.*its parts are answer, format"):
        reward_parts([batch], ("speed",))


def test_weighted_parts_replace_the_reward_in_a_step(llama_folder: Path) -> None:
    items = [
        replace(trajectory(0, [5], [7, 9], reward=0.0), reward_parts={"a": 1.0}),
        replace(trajectory(0, [5], [8, 9], reward=1.0, sample_index=1), reward_parts={"a": 0.0}),
    ]
    algorithm = AlgorithmConfig(
        preset="dr_grpo", shaping=ShapingConfig(reward_weights={"a": 2.0}), proximal="sampler", clip_high=9
    )
    worker = _worker(llama_folder, algorithm)

    before = _mean_logprob(worker, items[0])
    _step(worker, trajectories_to_batch(items))

    assert _mean_logprob(worker, items[0]) > before, "the part favours what the reward does not"


def _mean_logprob(worker: TrainWorker, item: Any) -> float:
    batch, _ = batch_from_arrow([trajectories_to_batch([item])])
    return float(worker._ready_engine.forward_logprobs(batch).sum())


def test_choice_over_a_view_is_none_for_objectives_that_choose_nothing() -> None:
    view = LossView(
        logprobs=torch.zeros(1, 1),
        entropy=None,
        sampler_logprobs=torch.zeros(1, 1),
        proximal_logprobs=None,
        ref_logprobs=None,
        advantages=torch.zeros(1, 1),
        loss_mask=torch.ones(1, 1, dtype=torch.bool),
    )
    loss_fn = PolicyLoss(AlgorithmConfig(), 16)

    assert not loss_fn.chooses_tokens
    assert loss_fn.choose_tokens(view) is None
    assert select_tokens(loss_fn.inputs(view), loss_fn._settings) is None


def test_distillation_compares_the_teacher_with_the_student_that_is_trained(llama_folder: Path) -> None:
    algorithm = AlgorithmConfig(preset="distillation")
    settings, engine = worker_settings(llama_folder, algorithm=algorithm), make_engine(llama_folder)
    # A teacher that agrees with the policy that sampled: nothing would be left to learn if that one were compared.
    groups = [group.append_column("teacher_logprobs", group["logprobs"]) for group in random_groups(version=1)]

    batch, _ = prepare_batch(engine, groups, TrainStepRequest(step=1, version=3, min_version=None), algorithm, settings)

    live = batch.loss_mask != 0
    gap = batch.logprobs[live] - engine.forward_logprobs(batch)[live]
    assert batch.advantages is not None
    assert np.abs(gap - gap.mean()).max() > 0.1
    np.testing.assert_allclose(batch.advantages[live], gap - gap.mean(), rtol=1e-4, atol=1e-4)
