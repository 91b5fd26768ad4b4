"""The worker without Ray: steps on Arrow batches, minibatches, publication over a real group, two ranks that meet."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import random_groups, training_config, trajectory, weights, worker_settings
from torch.multiprocessing import get_context

from rayrl.config.algorithm import AlgorithmConfig, KLConfig
from rayrl.errors import EngineError, TransferError
from rayrl.infra.collective_group import CollectiveGroup
from rayrl.infra.rendezvous import RendezvousAddress
from rayrl.infra.weight_manifest import checksum_of
from rayrl.infra.weight_transfer import receive_weights
from rayrl.training.step import TrainStepRequest, TrainStepResult
from rayrl.training.worker import TrainWorker
from rayrl.types.arrow import trajectories_to_batch
from rayrl.types.trajectory import FailureRecord

_NOWHERE = RendezvousAddress(host="127.0.0.1", port=1)


def _worker(folder: Path, **overrides: Any) -> TrainWorker:
    worker = TrainWorker(0, 1, worker_settings(folder, **overrides))
    worker.setup(_NOWHERE)
    return worker


def _request(step: int = 1, version: int = 0, min_version: int | None = None) -> TrainStepRequest:
    return TrainStepRequest(step=step, version=version, min_version=min_version)


def test_a_step_reports_means_per_token_and_counts(llama_folder: Path) -> None:
    worker = _worker(llama_folder)
    batches = random_groups()
    num_tokens = sum(sum(mask) for batch in batches for mask in batch["loss_mask"].to_pylist())

    result = worker.train_step(_request(), *batches)

    assert not result.skipped
    assert result.num_tokens == num_tokens
    assert result.metrics["policy/ratio"] == pytest.approx(1.0, rel=1e-5)
    assert result.metrics["train/loss_tokens"] == num_tokens
    assert result.metrics["train/processed_tokens"] < result.metrics["train/batch_tokens"]
    assert {"loss/total", "train/grad_norm", "train/lr", "mismatch/k3"} <= result.metrics.keys()
    assert worker.status().optimizer_steps == 1


def test_failures_and_stale_tokens_are_left_out_and_counted(llama_folder: Path) -> None:
    failure = FailureRecord(kind="workflow", message="ValueError: no")
    batch = trajectories_to_batch(
        [
            trajectory(0, [2, 3], [4, 5], reward=1.0, version=6),
            trajectory(0, [2, 3], [6, 7, 8], reward=0.0, version=2, sample_index=1),
            trajectory(0, [2, 3], [9], failure=failure, sample_index=2),
        ]
    )

    result = _worker(llama_folder).train_step(_request(version=7, min_version=5), batch)

    assert result.num_tokens == 2
    assert result.metrics["staleness/stale_tokens"] == 3
    assert result.metrics["staleness/trajectory_age_max"] == 5
    assert result.metrics["train/failed_trajectories"] == 1


def test_minibatches_are_optimizer_steps_around_one_proximal_policy(llama_folder: Path) -> None:
    worker = _worker(llama_folder, minibatches=3, training=training_config(lr=0.05))

    result = worker.train_step(_request(), *random_groups(num_groups=3))

    assert worker.status().optimizer_steps == 3
    assert result.metrics["policy/k3"] > 1e-4, "later minibatches have left the policy before the step"


def test_a_batch_without_usable_tokens_is_a_skipped_step(llama_folder: Path) -> None:
    failure = FailureRecord(kind="timeout", message="late")

    result = _worker(llama_folder).train_step(
        _request(), trajectories_to_batch([trajectory(0, [2], [3], failure=failure)])
    )

    assert result.skipped
    assert result.reason == "no token of the step carries loss"
    assert result.num_tokens == 0


def test_kl_to_the_initial_model_starts_at_zero_and_leaves_it(llama_folder: Path) -> None:
    worker = _worker(llama_folder, algorithm=AlgorithmConfig(kl=KLConfig(coef=0.1)))
    batches = random_groups()

    values = [worker.train_step(_request(step), *batches).metrics["policy/ref_kl"] for step in (1, 2, 3)]

    assert values[0] == pytest.approx(0.0, abs=1e-5)
    assert min(values[1:]) > 1e-3


def test_supervised_steps_lower_the_loss_without_an_algorithm(llama_folder: Path) -> None:
    worker = _worker(llama_folder, algorithm=None, transfer=None)
    batches = random_groups()

    losses = [worker.sft_step(step, *batches).metrics["loss/total"] for step in range(1, 6)]

    assert losses == sorted(losses, reverse=True)
    with pytest.raises(EngineError, match="no algorithm"):
        worker.train_step(_request(), *batches)
    with pytest.raises(TransferError, match="without transfer settings"):
        worker.weight_manifest(1)


def test_a_worker_that_is_not_set_up_says_so(llama_folder: Path) -> None:
    worker = TrainWorker(0, 1, worker_settings(llama_folder))

    with pytest.raises(EngineError, match="call setup first"):
        worker.status()
    assert worker.ready()["pid"] > 0


def test_published_weights_arrive_bit_equal_in_each_epoch(llama_folder: Path) -> None:
    worker = _worker(llama_folder)
    address = worker.host_transfer_rendezvous()
    members = ("train-0", "inference-0")
    with pytest.raises(TransferError, match="none was joined"):
        worker.send_weights(0)

    for epoch in (1, 2):
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(
                CollectiveGroup.join,
                address,
                name="weights",
                epoch=epoch,
                rank=1,
                members=members,
                backend="gloo",
                timeout_s=60.0,
            )
            worker.join_transfer(address, epoch, members, "gloo", 60.0)
            group = joined.result(timeout=60)
            arrived = pool.submit(receive_weights, group, worker.weight_manifest(epoch))
            digests = worker.send_weights(epoch).digests
            tensors, received = arrived.result(timeout=60)
            group.close()

        assert digests == received
        assert len(digests) > 0
        for name, tensor in weights(worker._ready_engine).items():
            assert tensors[name].equal(tensor)
        worker.train_step(_request(), *random_groups())
    worker.close()


def _second_rank(folder: str, addresses: Any, results: Any) -> None:
    torch.set_num_threads(1)
    results.put(_run_rank(1, folder, addresses.get(timeout=120)))


def _run_rank(rank: int, folder: str, address: RendezvousAddress, worker: TrainWorker | None = None) -> TrainStepResult:
    worker = worker or TrainWorker(rank, 2, worker_settings(Path(folder), training=training_config(data=2)))
    worker.setup(address)
    result = worker.train_step(_request(), *random_groups())
    worker.close()
    return result


@pytest.mark.distributed
def test_two_workers_meet_and_report_the_same_step_as_one(llama_folder: Path) -> None:
    context = get_context("spawn")
    addresses, results = context.Queue(), context.Queue()
    process = context.Process(target=_second_rank, args=(str(llama_folder), addresses, results))
    process.start()
    worker = TrainWorker(0, 2, worker_settings(llama_folder, training=training_config(data=2)))
    address = worker.host_training_rendezvous()
    addresses.put(address)

    first = _run_rank(0, str(llama_folder), address, worker)
    second = results.get(timeout=120)
    process.join(timeout=60)

    alone = _worker(llama_folder).train_step(_request(), *random_groups())
    assert first.metrics == second.metrics
    # Ranks pad on their own.
    names = alone.metrics.keys() - {"train/processed_tokens"}
    assert {name: first.metrics[name] for name in names} == pytest.approx(
        {name: alone.metrics[name] for name in names}, rel=1e-4, abs=1e-5
    )


def test_scores_of_a_probe_are_the_logprobs_of_the_model_and_checksums_those_of_its_weights(llama_folder: Path) -> None:
    from rayrl.models.loading import load_causal_lm

    model = load_causal_lm(llama_folder)
    worker = _worker(llama_folder)
    prompt, completions = (2, 3, 4), [(5, 6, 7), (8,)]

    scores = worker.score_probe(prompt, completions)

    for completion, row in zip(completions, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        temperature = worker._settings.temperature
        expected = (logits / temperature).log_softmax(-1)[range(len(completion)), list(completion)]
        torch.testing.assert_close(torch.tensor(row), expected, rtol=1e-5, atol=1e-5)
    assert worker.weight_checksums() == {
        name: checksum_of(tensor) for name, tensor in weights(worker._ready_engine).items()
    }
    worker.close()
