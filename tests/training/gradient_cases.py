"""One batch, one loss, one layout: two optimizer steps and what they gave; importable in spawned processes."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import make_engine, random_batch, training_config, weights

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.training.batch import TrainBatch
from rayrl.training.critic import ValueLoss
from rayrl.training.losses import LossFunction, PolicyLoss, SupervisedLoss

RTOL, ATOL = 1e-4, 1e-6
LARGE, SMALL = 8192, 48
ADAM = {"lr": 1e-3, "eps": 1e-3}
"""Adam divides by the size of the gradient: with a tiny eps the rounding of a gradient near 0 becomes a whole step."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained on, and how it is cut."""

    model: str
    """Path of the model folder."""
    kind: str = "ragged"
    """`ragged`: four groups of very different lengths; `idle`: one trajectory, so that other ranks have none."""
    loss: str = "grpo"
    """A preset, `entropy` (GRPO with a bonus for it), `sft`, or `value`."""
    budget: int = LARGE
    """Tokens of a micro-batch."""
    share: bool = True
    """Shared rows, or one row for each trajectory."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine."""


def make_loss(name: str) -> LossFunction:
    """The loss of a case."""
    if name == "value":
        return ValueLoss()
    if name == "sft":
        return SupervisedLoss()
    if name == "entropy":
        return PolicyLoss(AlgorithmConfig(entropy_coef=0.1), max_new_tokens=16)
    return PolicyLoss(AlgorithmConfig(preset=name), max_new_tokens=16)


def make_batch(kind: str) -> TrainBatch:
    """The batch of a case."""
    if kind == "idle":
        batch = random_batch(AlgorithmConfig(), num_groups=1, group_size=1, seed=2)
        assert batch.advantages is not None
        batch.advantages[:] = 1.0
    else:
        batch = random_batch(num_groups=4, group_size=4, seed=1)
    returns = (np.sin(batch.tokens) * (batch.loss_mask != 0)).astype(np.float32)
    return replace(batch, returns=returns, values=np.zeros_like(returns))


def two_steps(engine: Any, batch: TrainBatch, loss_fn: LossFunction) -> dict[str, Any]:
    """Gradient, weights and outputs after two optimizer steps."""
    gradients = engine.gradients(batch, loss_fn)
    steps = [engine.train_step(batch, loss_fn) for _ in range(2)]
    is_value = isinstance(loss_fn, ValueLoss)
    return {
        "gradients": gradients,
        "weights": weights(engine),
        "outputs": engine.forward_values(batch) if is_value else engine.forward_logprobs(batch),
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "sums": dict(steps[0].sums),
    }


def run_case(case: Case, rank: int = 0, world_size: int = 1, parallel: dict[str, int] | None = None) -> dict[str, Any]:
    """What one rank has after two steps."""
    config = training_config(parallel=parallel, micro_batch_tokens=case.budget, **ADAM, **case.engine)
    head = "scalar" if case.loss == "value" else "policy"
    engine = make_engine(
        Path(case.model), config, rank=rank, world_size=world_size, share_prompts=case.share, head=head
    )
    return two_steps(engine, make_batch(case.kind), make_loss(case.loss))


def run_cases(rank: int, world_size: int, parallel: dict[str, int], cases: list[Case]) -> list[dict[str, Any]]:
    """What one rank has after two steps of each case; large tensors from the first rank only."""
    results = [run_case(case, rank, world_size, parallel) for case in cases]
    return results if rank == 0 else [{"losses": one["losses"], "norms": one["norms"]} for one in results]


@cache
def reference(model: str, kind: str, loss: str) -> dict[str, Any]:
    """One process, one micro-batch, plain rows."""
    return run_case(Case(model=model, kind=kind, loss=loss, share=False))


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Everything that is there is that of the reference."""
    for part in ("gradients", "weights"):
        if part in actual:
            assert actual[part].keys() == expected[part].keys()
            for name, tensor in expected[part].items():
                torch.testing.assert_close(
                    actual[part][name], tensor, rtol=RTOL, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
                )
    if "outputs" in actual:
        np.testing.assert_allclose(actual["outputs"], expected["outputs"], rtol=RTOL, atol=1e-5)
        for name, value in expected["sums"].items():
            assert actual["sums"][name] == pytest.approx(value, rel=RTOL, abs=1e-4), name
    for part in ("losses", "norms"):
        assert actual[part] == pytest.approx(expected[part], rel=RTOL, abs=ATOL)
