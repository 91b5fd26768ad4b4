"""What the ranks of the DeepSpeed tests do; importable in spawned processes."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from samples import make_engine, random_batch, training_config, weights
from torch import Tensor

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.training import DeepSpeedEngine, TrainingConfig
from rayrl.training.batch import TrainBatch
from rayrl.training.critic import ValueLoss
from rayrl.training.losses import LossFunction, LossView, PolicyLoss, SupervisedLoss

ADAM = {"lr": 1e-3, "eps": 1e-4}
"""Adam divides by the size of the gradient: with a tiny eps the rounding of a gradient near 0 becomes a whole step."""
UPDATES = [
    ("grpo", "ragged", 8192, True),
    ("grpo", "ragged", 48, False),
    ("sft", "ragged", 48, True),
    ("sft", "idle", 8192, True),
    ("value", "ragged", 48, True),
]
"""Loss, batch, tokens of a micro-batch, whether prompts are shared."""


def zero_config(stage: int, *, data: int, micro_batch_tokens: int = 8192, **options: Any) -> TrainingConfig:
    """A layout on DeepSpeed."""
    config = training_config(data=data, micro_batch_tokens=micro_batch_tokens, **ADAM)
    engine = DeepSpeedEngine(type="deepspeed", zero_stage=stage, logprob_chunk_tokens=8, **options)
    return config.model_copy(update={"engine": engine})


def loss_of(name: str) -> LossFunction:
    if name == "value":
        return ValueLoss()
    return SupervisedLoss() if name == "sft" else PolicyLoss(AlgorithmConfig(preset=name), max_new_tokens=16)


def batch_of(kind: str) -> TrainBatch:
    if kind == "idle":
        return random_batch(num_groups=1, group_size=1, seed=2)
    batch = random_batch(num_groups=4, group_size=4, seed=1)
    returns = (np.sin(batch.tokens) * (batch.loss_mask != 0)).astype(np.float32)
    return replace(batch, returns=returns, values=np.zeros_like(returns))


def head_of(loss: str) -> dict[str, str]:
    """What an engine is made with for a loss."""
    return {"head": "scalar"} if loss == "value" else {}


def two_steps(engine: Any, batch: TrainBatch, loss_fn: LossFunction) -> dict[str, Any]:
    gradients = {name: gradient.clone() for name, gradient in engine.gradients(batch, loss_fn).items()}
    steps = [engine.train_step(batch, loss_fn) for _ in range(2)]
    forward = engine.forward_values if isinstance(loss_fn, ValueLoss) else engine.forward_logprobs
    return {
        "gradients": gradients,
        "weights": weights(engine),
        "logprobs": torch.from_numpy(forward(batch)),
        "losses": torch.tensor([step.loss for step in steps]),
        "norms": torch.tensor([step.grad_norm for step in steps]),
        "largest": torch.tensor([value for name, value in sorted(steps[0].sums.items()) if "/max_" in name]),
    }


class Unfit(SupervisedLoss):
    """A loss that is not finite itself, or whose gradient is not."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = super().__call__(view, denominator)
        if self._kind == "loss":
            return loss + math.inf, sums
        return (loss - loss.detach()).abs().sqrt() + loss.detach(), sums


def _engine(rank: int, world_size: int, folder: str, config: TrainingConfig, **options: Any) -> Any:
    return make_engine(Path(folder), config, rank=rank, world_size=world_size, **options)


def update(
    rank: int, world_size: int, folder: str, stage: int, case: tuple[Any, ...], options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Two steps of a case of `UPDATES`."""
    loss, kind, budget, share = case
    config = zero_config(stage, data=world_size, micro_batch_tokens=budget, **(options or {}))
    engine = _engine(rank, world_size, folder, config, share_prompts=share, **head_of(loss))
    return two_steps(engine, batch_of(kind), loss_of(loss))


def skips(rank: int, world_size: int, folder: str, stage: int, offload: bool) -> dict[str, Any]:
    """Two steps that must be skipped, and one after them, beside the same step on an engine without them."""
    config = zero_config(stage, data=world_size, micro_batch_tokens=48, offload_optimizer=offload)
    plain, disturbed = (_engine(rank, world_size, folder, config) for _ in range(2))
    batch = batch_of("ragged")
    before = weights(disturbed)
    skipped = [disturbed.train_step(batch, Unfit(kind)) for kind in ("loss", "gradient")]
    between = weights(disturbed)
    for engine in (plain, disturbed):
        engine.train_step(batch, SupervisedLoss())
    return {
        "skipped": [step.skipped for step in skipped],
        "reasons": [step.reason for step in skipped],
        "before": before,
        "between": between,
        "after": weights(disturbed),
        "plain": weights(plain),
        "steps": disturbed.status().optimizer_steps,
    }


def _steps_of(engine: Any) -> dict[str, Any]:
    steps = [engine.train_step(batch_of("ragged"), loss_of("grpo")) for _ in range(2)]
    return {"weights": weights(engine), "losses": [step.loss for step in steps], "random": torch.rand(4)}


def reload(rank: int, world_size: int, folder: str, stage: int, state: str) -> dict[str, Any]:
    """Two steps, save, two more; and the same two more after a reload into a fresh engine."""
    config = zero_config(stage, data=world_size)
    torch.manual_seed(11 + rank)
    engine = _engine(rank, world_size, folder, config)
    _steps_of(engine)
    engine.save(Path(state))
    saved = weights(engine)
    expected = _steps_of(engine)
    torch.manual_seed(99)
    fresh = _engine(rank, world_size, folder, config)
    fresh.load(Path(state))
    loaded = weights(fresh)
    return {"saved": saved, "loaded": loaded, "expected": expected, "actual": _steps_of(fresh)}


def read(rank: int, world_size: int, folder: str, stage: int, state: str) -> dict[str, Any]:
    """Load, and go on for two steps."""
    engine = _engine(rank, world_size, folder, zero_config(stage, data=world_size))
    engine.load(Path(state))
    return {"loaded": weights(engine), "actual": _steps_of(engine)}


def reference(rank: int, world_size: int, folder: str) -> Any:
    """Logprobs of the reference before and after a step."""
    engine = _engine(rank, world_size, folder, zero_config(3, data=world_size), with_reference=True)
    batch = batch_of("ragged")
    first = engine.forward_logprobs(batch)
    engine.train_step(batch, SupervisedLoss())
    return first, engine.forward_logprobs(batch, reference=True), engine.forward_logprobs(batch)


def alone(rank: int, world_size: int, folder: str, state: str) -> dict[str, Any]:
    """One rank reads what two ranks of ZeRO 3 wrote."""
    return read(rank, world_size, folder, 2, state)


def publish(rank: int, world_size: int, folder: str, export: str) -> dict[str, Any]:
    """What ZeRO 3 announces and gives for publication; and an export."""
    engine = _engine(rank, world_size, folder, zero_config(3, data=world_size))
    engine.export_hf(Path(export))
    published = [(name, tensor.clone()) for name, tensor in engine.weight_tensors("bfloat16")]
    return {"specs": engine.weight_specs("bfloat16"), "published": published}


def publish_in_buckets(rank: int, world_size: int, folder: str, bucket_bytes: int) -> dict[str, Any]:
    """A step and a publication of ZeRO 3 that divides every parameter; the most bytes that were whole at once."""
    from rayrl.training import deepspeed_engine

    options, size = deepspeed_engine.deepspeed_options, deepspeed_engine._GATHER_BYTES

    def divide_all(*args: Any) -> dict[str, Any]:
        result = options(*args)
        # Below this number of elements parameters stay whole, which would be all of a tiny model.
        result["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return result

    deepspeed_engine.deepspeed_options, deepspeed_engine._GATHER_BYTES = divide_all, bucket_bytes
    try:
        engine = _engine(rank, world_size, folder, zero_config(3, data=world_size))
        engine.train_step(batch_of("ragged"), loss_of("grpo"))
        most, published = 0, {}
        for name, tensor in engine.weight_tensors("float32"):
            published[name] = tensor.clone()
            most = max(most, sum(4 * weight.numel() for weight in engine._weights.values()))
    finally:
        deepspeed_engine.deepspeed_options, deepspeed_engine._GATHER_BYTES = options, size
    left = sum(4 * weight.numel() for weight in engine._weights.values())
    return {"weights": published, "most": most, "left": left}
