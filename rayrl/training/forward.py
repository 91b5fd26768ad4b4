"""What every engine does around a forward pass: views for the loss, the cost of attention, the outcome of a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrl.algorithms.nonfinite import describe_nonfinite
from rayrl.algorithms.sums import NUM_TOKENS, add_metrics, is_maximum
from rayrl.training.batch import TrainBatch
from rayrl.training.collate import MicroBatch
from rayrl.training.engine import StepResult
from rayrl.training.losses import LossView
from rayrl.training.policy_model import PolicyModel
from rayrl.training.scalar_head import HeadKind
from rayrl.training.step import logprob_gap_fault

_NONFINITE = "nonfinite/"
"""Prefix of the counts of inputs that are not finite, as `policy_loss` reports them."""


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
        token_versions=_whole_numbers(micro.take(batch.versions)),
        held_back=None if batch.held_back is None else _whole_numbers(micro.take(batch.held_back)) != 0,
    )


def _whole_numbers(values: Tensor | None) -> Tensor:
    """Return int64; float32 holds whole numbers up to 2^24 exactly, which versions do not reach."""
    assert values is not None, "the column is there"
    return values.long()


class StepTotals:
    """Loss and metrics of the micro-batches of one rank, joined over ranks and moved to the host once."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        self._num_processed = 0
        self._metrics: dict[str, Tensor] = {}

    def add(self, share: Tensor, metrics: Mapping[str, Tensor], num_processed: int) -> None:
        """Add one micro-batch: its share of the loss, its metrics, and the tokens of its forward pass."""
        self._loss = self._loss + share.detach()
        self._metrics = add_metrics(self._metrics, metrics)
        self._num_processed += num_processed

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return what is to be summed over ranks, and of what the maximum is to be taken; the second may be empty."""
        sums = [self._metrics[name].float() for name in self._names(maxima=False)]
        processed = self._loss.new_tensor(float(self._num_processed))
        maxima = [self._metrics[name].float() for name in self._names(maxima=True)]
        return torch.stack([self._loss, processed, *sums]), torch.stack(maxima) if maxima else self._loss.new_zeros(0)

    def read(self, sums: Tensor, maxima: Tensor, norm: Tensor) -> "StepReading":
        """Return the joined vectors and the gradient norm as numbers, in one transfer."""
        loss, processed, *values, norm_value = torch.cat([sums, maxima, norm[None]]).tolist()
        names = [*self._names(maxima=False), *self._names(maxima=True)]
        named = dict(zip(names, values, strict=True))
        return StepReading(loss=loss, num_processed=int(processed), norm=norm_value, metrics=named)

    def _names(self, *, maxima: bool) -> list[str]:
        return [name for name in self._metrics if is_maximum(name) == maxima]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """What `StepTotals` reads of a whole optimizer step."""

    loss: float
    num_processed: int
    """Tokens of all forward passes over all ranks, padding included."""
    norm: float
    metrics: dict[str, float]


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
    inputs = {name.removeprefix(_NONFINITE): value for name, value in sums.items() if name.startswith(_NONFINITE)}
    found = describe_nonfinite({name: int(value) for name, value in inputs.items() if math.isfinite(value)})
    causes = [name for name, value in sums.items() if not math.isfinite(value)]
    known = [found, f"also not finite: {', '.join(causes)}" if causes else ""]
    detail = "; ".join(text for text in known if text)
    return ", ".join(bad) + (f" ({detail})" if detail else "")


def reason_to_skip(reading: StepReading, max_logprob_gap: float | None) -> str | None:
    """Return why the update of a step must not be made; None if it may."""
    return not_finite(reading.loss, reading.norm, reading.metrics) or logprob_gap_fault(
        reading.metrics, reading.metrics.get(NUM_TOKENS, 0.0), max_logprob_gap
    )


def skipped_step(reason: str, lr: float) -> StepResult:
    """Return the result of a step that was not even tried."""
    return StepResult(
        skipped=True, reason=reason, loss=0.0, grad_norm=0.0, lr=lr, sums={"num_tokens": 0.0}, num_processed_tokens=0
    )
