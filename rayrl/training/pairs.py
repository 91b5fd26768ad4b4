"""Steps on pairs: the policy by DPO or IPO, a reward model by Bradley-Terry.

A loss on a pair needs both answers, which may lie in different micro-batches and on different ranks. So each step has
two passes: one without gradient over the whole batch gives each answer's number s (its logprob, or its score) and the
loss L of the pairs; the second calls backward on `sum_i (dL/ds_i) s_i`, which has the gradient of L and adds up over
any layout. Its price is one forward pass; a pair need not fit into one micro-batch.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rayrl.algorithms.preference import bradley_terry_loss, dpo_loss, ipo_loss, sequence_logprobs
from rayrl.algorithms.reinforce import reinforce_loss
from rayrl.config.supervised import PreferenceSection, RewardModelSection
from rayrl.training.batch import IntArray, TrainBatch
from rayrl.training.engine import StepResult, TrainEngine
from rayrl.training.losses import LossView
from rayrl.training.token_columns import columns_mask, to_columns, to_flat

PairLoss = PreferenceSection | RewardModelSection
"""The config of a loss on pairs."""


class LinearLoss:
    """`-sum(A s) / pairs` over logprobs or values s: the second pass. Its value is no measure of progress."""

    needs_entropy = False

    def denominator(self, loss_counts: IntArray) -> float:
        """Return the number of pairs."""
        return float((loss_counts > 0).sum()) / 2

    def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossFunction`."""
        assert view.advantages is not None, "a linear loss needs advantages"
        outputs = view.logprobs if view.values is None else view.values
        losses = reinforce_loss(outputs, view.advantages, view.loss_mask)
        return losses.sum() / denominator, {"num_tokens": view.loss_mask.sum().float()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPass:
    """The first pass over P pairs."""

    advantages: Tensor
    """[2P, S] minus the derivative of the loss of each pair by each token's number."""
    sums: dict[str, float]
    """What is logged, summed over pairs; `num_pairs` is P."""


def pair_step(engine: TrainEngine, batch: TrainBatch, loss: PairLoss) -> tuple[StepResult, dict[str, float]]:
    """Make one optimizer step on a batch of pairs, better answers first; return it and means over pairs."""
    first = pair_pass(engine, batch, loss)
    result = engine.train_step(replace(batch, advantages=to_flat(batch, first.advantages)), LinearLoss())
    return result, mean_over_pairs(first.sums)


def pair_pass(engine: TrainEngine, batch: TrainBatch, loss: PairLoss) -> PairPass:
    """Return loss, derivatives and metrics of a batch of pairs, without changing the engine."""
    _check_pairs(batch)
    if isinstance(loss, RewardModelSection):
        return _reward_model_pass(batch, to_columns(batch, engine.forward_values(batch)), loss)
    logprobs = to_columns(batch, engine.forward_logprobs(batch))
    reference = to_columns(batch, engine.forward_logprobs(batch, reference=True))
    return _preference_pass(batch, logprobs, reference, loss)


def mean_over_pairs(sums: dict[str, float]) -> dict[str, float]:
    """Return sums as means per pair, without their number."""
    num_pairs = max(sums["num_pairs"], 1.0)
    return {name: value / num_pairs for name, value in sums.items() if name != "num_pairs"}


def _preference_pass(batch: TrainBatch, logprobs: Tensor, reference: Tensor, loss: PreferenceSection) -> PairPass:
    mask = columns_mask(batch)
    average = loss.loss == "ipo" and loss.average
    logprobs.requires_grad_(True)
    with torch.enable_grad():
        chosen, rejected = _halves(sequence_logprobs(logprobs, mask, average))
        ref_chosen, ref_rejected = _halves(sequence_logprobs(reference, mask, average))
        if loss.loss == "dpo":
            losses = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, loss.beta, loss.label_smoothing)
        else:
            losses = ipo_loss(chosen, rejected, ref_chosen, ref_rejected, loss.beta)
        nll = -_halves(sequence_logprobs(logprobs, mask, average=True))[0]
        total = losses + loss.sft_coef * nll
        (slope,) = torch.autograd.grad(total.sum(), logprobs)
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    columns = {
        "loss/total": total,
        "pairs/accuracy": _in_order(chosen - rejected),
        "pairs/reward_accuracy": _in_order(margin),
        "pairs/margin": loss.beta * margin,
        "pairs/chosen_logprob": chosen,
        "pairs/rejected_logprob": rejected,
        "pairs/chosen_nll": nll,
    }
    return PairPass(advantages=-slope, sums=_sums(columns))


def _reward_model_pass(batch: TrainBatch, scores: Tensor, loss: RewardModelSection) -> PairPass:
    scores.requires_grad_(True)
    with torch.enable_grad():
        chosen, rejected = _halves(scores[:, 0])
        losses = bradley_terry_loss(chosen, rejected, center_coef=loss.center_coef)
        (slope,) = torch.autograd.grad(losses.sum(), scores)
    columns = {
        "loss/total": losses,
        "pairs/accuracy": _in_order(chosen - rejected),
        "pairs/margin": chosen - rejected,
        "pairs/chosen_score": chosen,
        "pairs/rejected_score": rejected,
    }
    return PairPass(advantages=-slope, sums=_sums(columns))


def _in_order(difference: Tensor) -> Tensor:
    """Return 1 for a pair in the right order, else 0; 1/2 for a tie, as a new head or reference gives."""
    return (torch.sign(difference.detach()) + 1) / 2


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    return values[0::2], values[1::2]


def _sums(columns: dict[str, Tensor]) -> dict[str, float]:
    sums = {name: float(values.detach().sum()) for name, values in columns.items()}
    return sums | {"num_pairs": float(len(columns["loss/total"]))}


def _check_pairs(batch: TrainBatch) -> None:
    """Assert that trajectories 2i and 2i + 1 share a prompt."""
    ids = batch.group_ids
    assert len(ids) % 2 == 0 and np.array_equal(ids[0::2], ids[1::2]), "a batch of pairs holds two answers per prompt"
