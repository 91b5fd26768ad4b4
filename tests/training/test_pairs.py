"""Steps on pairs: the gradient of the loss itself, whatever the layout; both kinds learn; metrics as sums."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from samples import VOCAB, make_engine, training_config, trajectory, weights, worker_settings

from rayrl.algorithms.preference import bradley_terry_loss, dpo_loss, ipo_loss, sequence_logprobs
from rayrl.config.supervised import PreferenceSection, RewardModelSection
from rayrl.errors import EngineError
from rayrl.infra.rendezvous import RendezvousAddress
from rayrl.rollout.pair_examples import loss_on_end
from rayrl.training.batch import TrainBatch, batch_from_arrow
from rayrl.training.collate import collate
from rayrl.training.pairs import LinearLoss, PairLoss, mean_over_pairs, pair_pass, pair_step
from rayrl.training.rows import plan_rows
from rayrl.training.token_columns import to_flat
from rayrl.training.worker import TrainWorker
from rayrl.types.arrow import trajectories_to_batch
from rayrl.types.trajectory import Trajectory

_LOOP = {"num_steps": 1, "batch_size": 1}


def _loss(kind: str, **options: Any) -> PairLoss:
    if kind == "bradley_terry":
        return RewardModelSection(**_LOOP, **({"center_coef": 0.05} | options))
    return PreferenceSection(**_LOOP, loss=kind, **options)  # type: ignore[arg-type]


def _pairs(num: int, *, on_end: bool, seed: int = 0) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    items = []
    for ordinal in range(num):
        prompt = rng.integers(2, VOCAB, size=rng.integers(3, 12)).tolist()
        for index in range(2):
            answer = rng.integers(2, VOCAB, size=rng.integers(1, 9)).tolist()
            item = trajectory(ordinal, prompt, answer, sample_index=index)
            items.append(loss_on_end(item) if on_end else item)
    return items


def _batch(kind: str, num: int = 5) -> TrainBatch:
    return batch_from_arrow([trajectories_to_batch(_pairs(num, on_end=kind == "bradley_terry"))])[0]


def _engine(folder: Path, kind: str, **options: Any) -> Any:
    """An engine whose policy has left the reference, or whose head is not zero."""
    if kind == "bradley_terry":
        engine = make_engine(folder, head="scalar", **options)
    else:
        engine = make_engine(folder, with_reference=True, **options)
    batch = _batch(kind)
    rng = np.random.default_rng(9)
    noise = rng.normal(size=len(batch.tokens)).astype(np.float32) * batch.loss_mask
    for _ in range(2):
        engine.train_step(replace(batch, advantages=noise), LinearLoss())
    return engine


def _gradients(engine: Any, batch: TrainBatch, loss: PairLoss) -> dict[str, torch.Tensor]:
    first = pair_pass(engine, batch, loss)
    found: dict[str, torch.Tensor] = engine.gradients(
        replace(batch, advantages=to_flat(batch, first.advantages)), LinearLoss()
    )
    return found


def _direct_gradients(engine: Any, batch: TrainBatch, loss: PairLoss) -> dict[str, torch.Tensor]:
    """One graph over the whole batch, with the loss of the pairs at its end."""
    rows = plan_rows(batch, share=False, attention_cost=0.0, max_tokens=8192)
    micro = collate(batch, rows, torch.device("cpu"))
    outputs = micro.spread(engine._policy(micro)[0])
    if isinstance(loss, RewardModelSection):
        total = bradley_terry_loss(outputs[0::2, 0], outputs[1::2, 0], center_coef=loss.center_coef).mean()
    else:
        with torch.no_grad():
            reference = micro.spread(engine._reference(micro)[0])
        average = loss.average
        sums, ref = (sequence_logprobs(each, micro.loss_mask, average) for each in (outputs, reference))
        pair = (sums[0::2], sums[1::2], ref[0::2], ref[1::2])
        losses = dpo_loss(*pair, loss.beta, loss.label_smoothing) if loss.loss == "dpo" else ipo_loss(*pair, loss.beta)
        nll = -sequence_logprobs(outputs, micro.loss_mask, average=True)[0::2]
        total = (losses + loss.sft_coef * nll).mean()
    total.backward()
    found = {name: weight.grad.clone() for name, weight in engine._weights.items() if weight.grad is not None}
    engine._optimizer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dpo", {"label_smoothing": 0.1}),
        ("dpo", {"sft_coef": 0.5}),
        ("ipo", {"beta": 0.3}),
        ("ipo", {"average": True}),
        ("bradley_terry", {}),
    ],
)
def test_the_two_passes_have_the_gradient_of_the_loss_itself(
    llama_folder: Path, kind: str, options: dict[str, Any]
) -> None:
    engine = _engine(llama_folder, kind, config=training_config(micro_batch_tokens=24))
    batch, loss = _batch(kind), _loss(kind, **options)

    actual = _gradients(engine, batch, loss)

    expected = _direct_gradients(engine, batch, loss)
    assert actual.keys() == expected.keys()
    # IPO's slope is 2 (h - 1 / (2 beta)), about ten: float32 rounds small entries by the size of the large ones.
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-6 * max(largest, 1.0))


def _rank(rank: int, world_size: int, folder: str, kinds: list[str]) -> list[dict[str, torch.Tensor]]:
    config = training_config(data=world_size, micro_batch_tokens=24, lr=1e-3, eps=1e-4)
    engines = [_engine(Path(folder), kind, config=config, rank=rank, world_size=world_size) for kind in kinds]
    return [_gradients(engine, _batch(kind), _loss(kind)) for engine, kind in zip(engines, kinds, strict=True)]


@pytest.mark.distributed
def test_two_ranks_that_split_the_pairs_give_the_gradient_of_one(llama_folder: Path, tmp_path: Path) -> None:
    kinds = ["dpo", "bradley_terry"]

    ranks = run_on_ranks(_rank, 2, tmp_path, str(llama_folder), kinds)

    for number, kind in enumerate(kinds):
        alone = _engine(llama_folder, kind, config=training_config(lr=1e-3, eps=1e-4))
        expected = _gradients(alone, _batch(kind), _loss(kind))
        for results in ranks:
            for name, tensor in expected.items():
                torch.testing.assert_close(results[number][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "bradley_terry"])
def test_steps_bring_the_pairs_into_the_right_order(llama_folder: Path, kind: str) -> None:
    pairs = _loss(kind)
    training = training_config(lr=3e-3)
    settings = worker_settings(llama_folder, algorithm=None, transfer=None, pairs=pairs, training=training)
    worker = TrainWorker(0, 1, settings)
    worker.setup(RendezvousAddress(host="127.0.0.1", port=1))
    batch = trajectories_to_batch(_pairs(8, on_end=kind == "bradley_terry"))

    before = mean_over_pairs(worker.evaluate_pairs(batch))
    for step in range(1, 31):
        result = worker.pair_step(step, batch)
    after = mean_over_pairs(worker.evaluate_pairs(batch))

    assert not result.skipped
    assert before["pairs/margin"] == pytest.approx(0.0, abs=1e-5), "policy and reference are the same model"
    # Of a policy the losses move the order relative to the reference, which is a tie in the beginning.
    order = "pairs/accuracy" if kind == "bradley_terry" else "pairs/reward_accuracy"
    assert after[order] >= 0.9 > 0.5 == before[order]
    assert after["pairs/margin"] > 0.1
    assert after["loss/total"] < before["loss/total"]
    assert result.metrics["loss/total"] < before["loss/total"]


def test_an_evaluation_changes_nothing_and_adds_up_over_batches(llama_folder: Path) -> None:
    engine = _engine(llama_folder, "dpo")
    before = weights(engine)
    items = _pairs(6, on_end=False)
    parts = [batch_from_arrow([trajectories_to_batch(part)])[0] for part in (items, items[:4], items[4:])]

    whole, first, second = (pair_pass(engine, part, _loss("dpo")).sums for part in parts)

    assert whole == pytest.approx({name: first[name] + second[name] for name in whole}, rel=1e-4, abs=1e-5)
    assert all(tensor.equal(before[name]) for name, tensor in weights(engine).items())


def test_answers_to_different_prompts_are_no_pair(llama_folder: Path) -> None:
    items = [trajectory(0, [2, 3], [4]), trajectory(1, [2, 3], [5])]
    batch, _ = batch_from_arrow([trajectories_to_batch(items)])

    with pytest.raises(AssertionError, match="two answers per prompt"):
        pair_step(make_engine(llama_folder, with_reference=True), batch, _loss("dpo"))


def test_a_worker_without_a_loss_on_pairs_says_so(llama_folder: Path) -> None:
    worker = TrainWorker(0, 1, worker_settings(llama_folder))
    worker.setup(RendezvousAddress(host="127.0.0.1", port=1))

    with pytest.raises(EngineError, match="not made for pairs"):
        worker.pair_step(1, trajectories_to_batch(_pairs(1, on_end=False)))
