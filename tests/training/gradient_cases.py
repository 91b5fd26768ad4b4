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
from rayrl.config.training import DeepSpeedEngine, FsdpEngine, TrainingConfig
from rayrl.training.batch import TrainBatch
from rayrl.training.critic import ValueLoss
from rayrl.training.losses import LossFunction, PolicyLoss, SupervisedLoss

RTOL, ATOL = 1e-4, 1e-6
LARGE, SMALL = 8192, 48
OPTIMIZERS = {"adam": {"lr": 1e-4, "eps": 1e-8}, "linear": {"lr": 3e-2, "eps": 1e-1}}
"""Two courses of AdamW, as each hides what the other shows.

`adam`: the default eps. A change is lr g / |g|, nearly the same for all sizes of the gradient. The relative rounding of
an element, which is large where summands cancel out, moves a weight by lr times as much: at 1e-4 that stays below the
tolerance down to elements that are right to a hundredth, while a wrong sign moves the weight by 2e-4.

`linear`: eps above nearly all elements of the clipped gradient (norm 1). A change is about lr / eps g, so that a wrong
factor of a part of the gradient, of the clipping or of the second gradient shows; rounding is not magnified. Here the
changes themselves are compared, at the same tolerances, and not only the weights, next to which they are small.
"""
WAYS = ((LARGE, True, True), (SMALL, False, True), (LARGE, False, False), (SMALL, True, False))
"""Tokens of a micro-batch, shared prompts, packing: every pair of values of any two of them."""


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
    optimizer: str = "linear"
    """One of `OPTIMIZERS`."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine; with `zero_stage` it is that of DeepSpeed."""


def ways_of(model: str, loss: str, kind: str, engine: dict[str, Any] | None = None) -> list[Case]:
    """One batch cut in each of `WAYS`, both optimizers among them."""
    return [
        Case(
            model=model,
            kind=kind,
            loss=loss,
            budget=budget,
            share=share,
            optimizer="adam" if share else "linear",
            engine={"packing": packing} | (engine or {}),
        )
        for budget, share, packing in WAYS
    ]


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
        # With 1 the gradient would be thirty times that of `ragged`, up to 7, and an element of a sum of such numbers
        # is rounded by more than ATOL in float32, in whatever order it is added up.
        batch.advantages[:] = 0.1
    else:
        batch = random_batch(num_groups=4, group_size=4, seed=1)
    returns = (np.sin(batch.tokens) * (batch.loss_mask != 0)).astype(np.float32)
    return replace(batch, returns=returns, values=np.zeros_like(returns))


def two_steps(engine: Any, batch: TrainBatch, loss_fn: LossFunction) -> dict[str, Any]:
    """Gradient, weights and outputs after two optimizer steps."""
    before = weights(engine)
    gradients = engine.gradients(batch, loss_fn)
    steps = [engine.train_step(batch, loss_fn) for _ in range(2)]
    after = weights(engine)
    is_value = isinstance(loss_fn, ValueLoss)
    return {
        "gradients": gradients,
        "weights": after,
        "changes": {name: tensor - before[name] for name, tensor in after.items()},
        "outputs": engine.forward_values(batch) if is_value else engine.forward_logprobs(batch),
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "sums": dict(steps[0].sums),
    }


def _config(case: Case, parallel: dict[str, int] | None) -> TrainingConfig:
    options = dict(case.engine)
    config = training_config(parallel=parallel, micro_batch_tokens=case.budget, **OPTIMIZERS[case.optimizer])
    if "zero_stage" in options:
        engine: Any = DeepSpeedEngine(type="deepspeed", logprob_chunk_tokens=8, **options)
    else:
        engine = FsdpEngine(type="fsdp", logprob_chunk_tokens=8, **options)
    return config.model_copy(update={"engine": engine})


def run_case(case: Case, rank: int = 0, world_size: int = 1, parallel: dict[str, int] | None = None) -> dict[str, Any]:
    """What one rank has after two steps."""
    head = "scalar" if case.loss == "value" else "policy"
    engine = make_engine(
        Path(case.model),
        _config(case, parallel),
        rank=rank,
        world_size=world_size,
        share_prompts=case.share,
        head=head,
    )
    result = two_steps(engine, make_batch(case.kind), make_loss(case.loss))
    if case.optimizer != "linear":
        del result["changes"]
    return result


def run_cases(rank: int, world_size: int, parallel: dict[str, int], cases: list[Case]) -> list[dict[str, Any]]:
    """What one rank has after two steps of each case; large tensors from the first rank only."""
    results = [run_case(case, rank, world_size, parallel) for case in cases]
    return results if rank == 0 else [{"losses": one["losses"], "norms": one["norms"]} for one in results]


@cache
def reference(model: str, kind: str, loss: str, optimizer: str = "linear") -> dict[str, Any]:
    """One process, one micro-batch, plain rows below each other."""
    return run_case(
        Case(model=model, kind=kind, loss=loss, share=False, optimizer=optimizer, engine={"packing": False})
    )


def reference_of(case: Case) -> dict[str, Any]:
    """What a case must give."""
    return reference(case.model, case.kind, case.loss, case.optimizer)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Everything that is there is that of the reference."""
    for part in ("gradients", "weights", "changes"):
        if part in actual:
            assert actual[part].keys() == expected[part].keys()
            for name, tensor in expected[part].items():
                torch.testing.assert_close(
                    actual[part][name],
                    tensor,
                    rtol=RTOL,
                    atol=ATOL,
                    msg=lambda text, where=f"{part} of {name}": f"{where}: {text}",
                )
    if "outputs" in actual:
        np.testing.assert_allclose(actual["outputs"], expected["outputs"], rtol=RTOL, atol=1e-5)
        for name, value in expected["sums"].items():
            assert actual["sums"][name] == pytest.approx(value, rel=RTOL, abs=1e-4), name
    for part in ("losses", "norms"):
        assert actual[part] == pytest.approx(expected[part], rel=RTOL, abs=ATOL)
