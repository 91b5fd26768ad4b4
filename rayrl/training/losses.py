"""What the engine calls backward on: the policy objective and the supervised loss, with denominators of the whole step.

A loss sees one micro-batch at a time and is divided by a number that belongs to the whole optimizer step, over all
micro-batches and ranks; so the parts add up to the same loss and gradient however the batch is laid out.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rayrl.algorithms.advantage import AdvantageInputs, AdvantageSettings, compute_advantages
from rayrl.algorithms.aggregation import AggregationMode, aggregate_loss
from rayrl.algorithms.objective import LossInputs, ObjectiveSettings, policy_loss
from rayrl.algorithms.sft import sft_loss
from rayrl.config.algorithm import AlgorithmConfig
from rayrl.training.batch import FloatArray, IntArray, TrainBatch
from rayrl.training.token_columns import columns_mask, to_flat


@dataclass(frozen=True, slots=True, kw_only=True)
class LossView:
    """What a loss sees of one micro-batch: N trajectories, their loss-carrying tokens side by side in S columns."""

    logprobs: Tensor
    """[N, S] under the policy, with gradient; all 0 and without gradient where the model has a scalar head instead."""
    entropy: Tensor | None
    """[N, S] with gradient, if the loss needs it."""
    sampler_logprobs: Tensor
    """[N, S] as reported when sampled."""
    proximal_logprobs: Tensor | None
    """[N, S] None: the policy before this step, whose logprobs are those of this very forward."""
    ref_logprobs: Tensor | None
    """[N, S] under the reference policy, if there is one."""
    advantages: Tensor | None
    """[N, S] None for supervised batches."""
    loss_mask: Tensor
    """[N, S] bool."""
    values: Tensor | None = None
    """[N, S] of the scalar head, with gradient; None if the model has none."""
    old_values: Tensor | None = None
    """[N, S] of the critic before this step, if there is one."""
    returns: Tensor | None = None
    """[N, S] what a critic has to learn."""


class LossFunction(Protocol):
    """The loss of one optimizer step."""

    needs_entropy: bool

    def denominator(self, loss_counts: IntArray) -> float:
        """Return what the loss is divided by, given [N] loss-carrying tokens of all trajectories of the step."""
        ...

    def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the share of the micro-batch in the loss (0-dim), and 0-dim sums over tokens to log."""
        ...


class PolicyLoss:
    """The objective of an `AlgorithmConfig`."""

    def __init__(self, config: AlgorithmConfig, max_new_tokens: int) -> None:
        self.needs_entropy = config.entropy_coef != 0
        self._mode: AggregationMode = config.aggregation
        self._max_tokens = max_new_tokens
        self._by_sampler = config.proximal == "sampler"
        self._settings = objective_settings(config)

    def denominator(self, loss_counts: IntArray) -> float:
        """See `LossFunction`."""
        return _denominator(loss_counts, self._mode)

    def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossFunction`."""
        assert view.advantages is not None, "a policy loss needs advantages"
        if self._by_sampler:
            proximal = view.sampler_logprobs
        elif view.proximal_logprobs is not None:
            proximal = view.proximal_logprobs
        else:
            proximal = view.logprobs.detach()
        token_losses, sums = policy_loss(
            LossInputs(
                logprobs=view.logprobs,
                proximal_logprobs=proximal,
                sampler_logprobs=view.sampler_logprobs,
                ref_logprobs=view.ref_logprobs,
                entropy=view.entropy,
                advantages=view.advantages,
                loss_mask=view.loss_mask,
            ),
            self._settings,
        )
        return aggregate_loss(token_losses, view.loss_mask, self._mode, self._max_tokens, denominator), sums


class SupervisedLoss:
    """The mean negative log-likelihood of the tokens that carry loss."""

    needs_entropy = False

    def denominator(self, loss_counts: IntArray) -> float:
        """See `LossFunction`."""
        return _denominator(loss_counts, "token_mean")

    def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossFunction`."""
        token_losses = sft_loss(view.logprobs, view.loss_mask)
        sums = {"num_tokens": view.loss_mask.sum().float(), "sft/nll": token_losses.detach().sum()}
        return aggregate_loss(token_losses, view.loss_mask, "token_mean", denominator=denominator), sums


def objective_settings(config: AlgorithmConfig) -> ObjectiveSettings:
    """Return the numbers of `policy_loss` for a config; no importance weights where the sampler is the centre."""
    by_sampler = config.proximal == "sampler"
    return ObjectiveSettings(
        objective=config.objective,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        ratio_form=config.ratio_form,
        tau_pos=config.tau_pos,
        tau_neg=config.tau_neg,
        divergence=config.divergence,
        divergence_threshold=config.divergence_threshold,
        second_moment=config.second_moment,
        cov_share=config.cov_share,
        cov_low=config.cov_low,
        cov_high=config.cov_high,
        cov_kl_coef=config.cov_kl_coef,
        importance_level=None if by_sampler else config.importance.level,
        importance_mode=config.importance.mode,
        importance_low=config.importance.low,
        importance_high=config.importance.high,
        rejection_level=None if by_sampler else config.rejection.level,
        rejection_low=config.rejection.low,
        rejection_high=config.rejection.high,
        kl_coef=config.kl.coef,
        kl_form=config.kl.form,
        entropy_coef=config.entropy_coef,
    )


def batch_advantages(batch: TrainBatch, config: AlgorithmConfig) -> FloatArray:
    """Return [sum T] advantages of the loss-carrying tokens over the whole batch; the same on every rank."""
    advantages, _ = compute_advantages(
        AdvantageInputs(
            rewards=torch.from_numpy(batch.rewards.astype(np.float32)),
            group_ids=torch.from_numpy(batch.group_ids),
            loss_mask=columns_mask(batch),
        ),
        AdvantageSettings(
            advantage=config.advantage,
            scale=config.advantage_scale,
            eps=config.advantage_eps,
            k=config.pass_k,
            threshold=config.pass_threshold,
        ),
    )
    return to_flat(batch, advantages)


def _denominator(loss_counts: IntArray, mode: AggregationMode) -> float:
    """Return tokens for `token_mean`, else trajectories with a token; as `loss_denominator`, on counts."""
    return float(loss_counts.sum() if mode == "token_mean" else (loss_counts > 0).sum())
