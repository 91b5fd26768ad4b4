"""One gradient: ranks, budgets, shared prompts and an idle rank change neither gradient nor update."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from samples import make_engine, random_batch, training_config, weights

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.training.batch import TrainBatch
from rayrl.training.losses import LossFunction, PolicyLoss, SupervisedLoss

_RTOL, _ATOL = 1e-4, 1e-6
_LARGE, _SMALL = 8192, 48
_ADAM = {"lr": 1e-3, "eps": 1e-4}
"""Adam divides by the size of the gradient: with a tiny eps the rounding of a gradient near 0 becomes a whole step."""


def _loss(name: str) -> LossFunction:
    return SupervisedLoss() if name == "sft" else PolicyLoss(AlgorithmConfig(preset=name), max_new_tokens=16)


def _one_trajectory() -> TrainBatch:
    """Two ranks for a single trajectory: one of them has nothing to do."""
    return random_batch(AlgorithmConfig(), num_groups=1, group_size=1, seed=2)


def _batch(kind: str) -> TrainBatch:
    if kind == "idle":
        batch = _one_trajectory()
        assert batch.advantages is not None
        batch.advantages[:] = 1.0
        return batch
    return random_batch(num_groups=4, group_size=4, seed=1)


def _two_steps(engine: Any, batch: TrainBatch, loss_fn: LossFunction) -> dict[str, Any]:
    gradients = engine.gradients(batch, loss_fn)
    steps = [engine.train_step(batch, loss_fn) for _ in range(2)]
    return {
        "gradients": gradients,
        "weights": weights(engine),
        "logprobs": engine.forward_logprobs(batch),
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "sums": dict(steps[0].sums),
    }


def _reference(folder: Path, kind: str, loss_name: str) -> dict[str, Any]:
    """One process, one micro-batch, plain rows."""
    engine = make_engine(folder, training_config(**_ADAM), share_prompts=False)
    return _two_steps(engine, _batch(kind), _loss(loss_name))


def _assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for part in ("gradients", "weights"):
        for name, tensor in expected[part].items():
            torch.testing.assert_close(
                actual[part][name], tensor, rtol=_RTOL, atol=_ATOL, msg=lambda text, name=name: f"{name}: {text}"
            )
    torch.testing.assert_close(
        torch.from_numpy(actual["logprobs"]), torch.from_numpy(expected["logprobs"]), rtol=_RTOL, atol=1e-5
    )
    for part in ("losses", "norms"):
        assert actual[part] == pytest.approx(expected[part], rel=_RTOL, abs=_ATOL)
    for name, value in expected["sums"].items():
        assert actual["sums"][name] == pytest.approx(value, rel=_RTOL, abs=1e-4), name


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("budget", [_LARGE, _SMALL], ids=["large", "small"])
@pytest.mark.parametrize("loss_name", ["grpo", "gspo", "dr_grpo", "sft"])
def test_one_rank_gives_the_reference_update_when_budget_or_rows_differ(
    llama_folder: Path, share: bool, budget: int, loss_name: str
) -> None:
    expected = _reference(llama_folder, "ragged", loss_name)

    engine = make_engine(llama_folder, training_config(micro_batch_tokens=budget, **_ADAM), share_prompts=share)
    actual = _two_steps(engine, _batch("ragged"), _loss(loss_name))

    _assert_same(actual, expected)


def _cases(rank: int, world_size: int, folders: dict[str, str], cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    results = []
    for model, kind, loss_name, budget, share in cases:
        config = training_config(data=world_size, micro_batch_tokens=budget, **_ADAM)
        engine = make_engine(Path(folders[model]), config, rank=rank, world_size=world_size, share_prompts=share)
        results.append(_two_steps(engine, _batch(kind), _loss(loss_name)))
    return results


@pytest.mark.distributed
def test_two_ranks_give_the_reference_update_in_every_layout(
    llama_folder: Path, untied_folder: Path, tmp_path: Path
) -> None:
    folders = {"tied": llama_folder, "untied": untied_folder}
    cases = [
        ("tied", "ragged", "grpo", _LARGE, True),
        ("tied", "ragged", "grpo", _SMALL, False),
        ("untied", "ragged", "grpo", _SMALL, True),
        ("untied", "ragged", "dr_grpo", _LARGE, False),
        ("tied", "ragged", "gspo", _SMALL, True),
        ("tied", "ragged", "sft", _SMALL, True),
        ("tied", "idle", "grpo", _LARGE, True),
        ("untied", "idle", "sft", _SMALL, False),
    ]

    ranks = run_on_ranks(_cases, 2, tmp_path, {name: str(path) for name, path in folders.items()}, cases)

    for number, (model, kind, loss_name, _, _) in enumerate(cases):
        expected = _reference(folders[model], kind, loss_name)
        for results in ranks:
            _assert_same(results[number], expected)


def _bfloat16_case(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    config = training_config(data=world_size, autocast="bfloat16")
    engine = make_engine(Path(folder), config, rank=rank, world_size=world_size)
    return _two_steps(engine, _batch("ragged"), _loss("sft"))


@pytest.mark.distributed
def test_bfloat16_products_are_close_to_float32_on_one_rank_and_on_two(llama_folder: Path, tmp_path: Path) -> None:
    expected = _reference(llama_folder, "ragged", "sft")

    alone = _bfloat16_case(0, 1, str(llama_folder))
    together = run_on_ranks(_bfloat16_case, 2, tmp_path, str(llama_folder))[0]

    for actual in (alone, together):
        assert all(tensor.dtype == torch.float32 for tensor in actual["weights"].values())
        assert actual["losses"][0] == pytest.approx(expected["losses"][0], rel=0.02)
        for name, gradient in expected["gradients"].items():
            error = (actual["gradients"][name] - gradient).norm() / gradient.norm()
            assert error < 0.08, name
