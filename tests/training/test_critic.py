"""A critic in the worker: values before advantages, a warm-up that leaves the policy alone, save and load."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import random_groups, weights, worker_settings

from rayrl.algorithms.generalized_advantage import gae
from rayrl.algorithms.token_rewards import rewards_to_tokens
from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.critic import CriticConfig
from rayrl.config.loader import parse_section
from rayrl.errors import CheckpointError, ConfigError
from rayrl.infra.rendezvous import RendezvousAddress
from rayrl.training.batch import batch_from_arrow
from rayrl.training.losses import assign_advantages
from rayrl.training.step import TrainStepRequest, TrainStepResult
from rayrl.training.token_columns import columns_mask, to_columns
from rayrl.training.worker import TrainWorker


def _worker(folder: Path, *, num_steps: int = 100, minibatches: int = 1, **critic: Any) -> TrainWorker:
    algorithm = AlgorithmConfig(preset="ppo", critic=CriticConfig(**({"lr": 0.01} | critic)))
    settings = worker_settings(folder, algorithm=algorithm, num_steps=num_steps, minibatches=minibatches)
    worker = TrainWorker(0, 1, settings)
    worker.setup(RendezvousAddress(host="127.0.0.1", port=1))
    return worker


def _step(worker: TrainWorker, step: int = 1) -> TrainStepResult:
    return worker.train_step(TrainStepRequest(step=step, version=0, min_version=None), *random_groups())


def test_advantages_are_those_of_gae_on_the_tokens_of_the_batch() -> None:
    batch, _ = batch_from_arrow(random_groups())
    rng = np.random.default_rng(0)
    values = (rng.normal(size=len(batch.tokens)) * batch.loss_mask).astype(np.float32)
    config = AlgorithmConfig(preset="ppo", critic=CriticConfig(lam=0.9, gamma=0.8, whiten=False))

    assigned = assign_advantages(replace(batch, values=values), config)

    mask = columns_mask(batch)
    rewards = rewards_to_tokens(torch.from_numpy(batch.rewards), mask)
    expected, returns = gae(rewards, to_columns(batch, values), mask, 0.8, 0.9)
    assert assigned.advantages is not None
    assert assigned.returns is not None
    torch.testing.assert_close(to_columns(batch, assigned.advantages), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(to_columns(batch, assigned.returns), returns, rtol=1e-6, atol=1e-6)


def test_whitened_advantages_have_mean_zero_and_variance_one_over_all_tokens() -> None:
    batch, _ = batch_from_arrow(random_groups())
    batch = replace(batch, values=np.zeros(len(batch.tokens), dtype=np.float32))

    advantages = assign_advantages(batch, AlgorithmConfig(preset="ppo")).advantages

    assert advantages is not None
    live = advantages[batch.loss_mask != 0]
    assert live.mean() == pytest.approx(0.0, abs=1e-5)
    assert live.std(ddof=1) == pytest.approx(1.0, rel=1e-4)


def test_a_critic_explains_more_of_the_returns_with_every_few_steps(llama_folder: Path) -> None:
    worker = _worker(llama_folder, clip=None)

    explained = [_step(worker, step).metrics["critic/explained_variance"] for step in range(1, 22)]

    assert explained[0] == pytest.approx(0.0, abs=1e-5)
    assert explained[20] > explained[0] + 0.3


def test_a_warmup_step_moves_the_critic_and_not_the_policy(llama_folder: Path) -> None:
    worker = _worker(llama_folder, num_steps=10, warmup_steps=2)
    before = weights(worker._ready_engine)

    first = _step(worker, 1)

    assert not first.skipped
    assert first.num_tokens > 0
    assert first.metrics["critic/grad_norm"] > 0
    assert "train/grad_norm" not in first.metrics
    assert all(tensor.equal(before[name]) for name, tensor in weights(worker._ready_engine).items())
    _step(worker, 2)
    third = _step(worker, 3)
    assert third.metrics["train/grad_norm"] > 0
    assert worker.status().optimizer_steps == 1


def test_the_critic_makes_as_many_optimizer_steps_as_the_policy(llama_folder: Path) -> None:
    worker = _worker(llama_folder, minibatches=3)

    _step(worker)

    assert worker._critic is not None
    assert worker._critic._engine.status().optimizer_steps == worker.status().optimizer_steps == 3


def test_a_critic_with_epochs_makes_its_steps_that_often_within_a_schedule_as_much_longer(llama_folder: Path) -> None:
    worker = _worker(llama_folder, num_steps=2, minibatches=1, epochs=4)

    _step(worker)

    assert worker._critic is not None
    assert worker._critic._engine.status().optimizer_steps == 4
    assert worker.status().optimizer_steps == 1
    assert worker._critic._engine._num_steps == 8


def test_a_saved_worker_brings_its_critic_back(llama_folder: Path, tmp_path: Path) -> None:
    worker = _worker(llama_folder)
    _step(worker, 1)
    worker.save(str(tmp_path / "train"))
    restored = _worker(llama_folder)
    restored.load(str(tmp_path / "train"))

    results = [_step(each, 2).metrics for each in (worker, restored)]

    assert results[0] == results[1]


def test_a_checkpoint_without_a_critic_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    plain = TrainWorker(0, 1, worker_settings(llama_folder))
    plain.setup(RendezvousAddress(host="127.0.0.1", port=1))
    plain.save(str(tmp_path / "train"))

    with pytest.raises(CheckpointError, match="critic"):
        _worker(llama_folder).load(str(tmp_path / "train"))


@pytest.mark.parametrize("data", [{"advantage": "gae"}, {"preset": "ppo", "critic": None}, {"critic": {}}])
def test_gae_without_a_critic_and_a_critic_without_gae_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gae needs a critic"):
        parse_section(AlgorithmConfig, data)
