"""What every engine does around a forward pass: views for the loss, the cost of attention, the outcome of a step."""

import math

import torch
from torch import Tensor

from rayrl.training.batch import TrainBatch
from rayrl.training.collate import MicroBatch
from rayrl.training.engine import StepResult
from rayrl.training.losses import LossView
from rayrl.training.policy_model import PolicyModel
from rayrl.training.scalar_head import HeadKind


def loss_view(
    micro: MicroBatch, batch: TrainBatch, output: Tensor, entropy: Tensor | None, head: HeadKind = "policy"
) -> LossView:
    """Return what a loss sees of a micro-batch, given what the model's head gave for its targets [K], and entropies."""
    sampler = micro.take(batch.logprobs)
    assert sampler is not None, "sampler logprobs are always there"
    spread = micro.spread(output)
    return LossView(
        logprobs=spread if head == "policy" else torch.zeros_like(spread),
        values=spread if head == "scalar" else None,
        entropy=None if entropy is None else micro.spread(entropy),
        sampler_logprobs=sampler,
        proximal_logprobs=micro.take(batch.proximal_logprobs),
        ref_logprobs=micro.take(batch.ref_logprobs),
        advantages=micro.take(batch.advantages),
        loss_mask=micro.loss_mask,
        old_values=micro.take(batch.values),
        returns=micro.take(batch.returns),
    )


def attention_cost(model: PolicyModel) -> float:
    """Return `row_cost`'s time of one pair of tokens: 4 width per layer, over 2 operations per weight of the blocks."""
    config = model.lm.config
    head_width = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * head_width
    per_token = 2 * sum(weight.numel() for layer in model.layers() for weight in layer.parameters())
    return per_pair / max(per_token, 1)


def not_finite(loss: float, norm: float, sums: dict[str, float]) -> str | None:
    """Return what is not finite, with the sums that are not; None if loss and norm are finite."""
    bad = [
        f"{name} is {value}" for name, value in (("loss", loss), ("gradient norm", norm)) if not math.isfinite(value)
    ]
    if not bad:
        return None
    causes = [name for name, value in sums.items() if not math.isfinite(value)]
    return ", ".join(bad) + (f" (also not finite: {', '.join(causes)})" if causes else "")


def skipped_step(reason: str, lr: float) -> StepResult:
    """Return the result of a step that was not even tried."""
    return StepResult(
        skipped=True, reason=reason, loss=0.0, grad_norm=0.0, lr=lr, sums={"num_tokens": 0.0}, num_processed_tokens=0
    )
