"""What the engine calls backward on: the policy objective and the supervised loss, with denominators of the whole step.

A loss sees one micro-batch at a time and is divided by a number that belongs to the whole optimizer step, over all
micro-batches and ranks; so the parts add up to the same loss and gradient however the batch is laid out.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rayrl.algorithms.advantage import AdvantageInputs, AdvantageSettings, compute_advantages
from rayrl.algorithms.aggregation import AggregationMode, aggregate_loss
from rayrl.algorithms.masking import safe_mean
from rayrl.algorithms.objective import LossInputs, ObjectiveSettings, policy_loss, select_tokens
from rayrl.algorithms.sft import sft_loss
from rayrl.algorithms.staleness import loglinear_proximal
from rayrl.algorithms.tables import SELECTIONS
from rayrl.algorithms.whitening import masked_whiten
from rayrl.config.algorithm import AlgorithmConfig, ProximalName
from rayrl.training.batch import FloatArray, IntArray, TrainBatch
from rayrl.training.token_columns import columns_mask, to_columns, to_flat


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
    token_versions: Tensor | None = None
    """[N, S] int64 version that sampled each token."""
    held_back: Tensor | None = None
    """[N, S] bool, tokens that the objective treats apart, chosen over the whole optimizer step; None if none were."""


class LossFunction(Protocol):
    """The loss of one optimizer step."""

    needs_entropy: bool

    def denominator(self, loss_counts: IntArray) -> float:
        """Return what the loss is divided by, given [N] loss-carrying tokens of all trajectories of the step."""
        ...

    def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the share of the micro-batch in the loss (0-dim), and 0-dim metrics: sums over tokens, and maxima."""
        ...


class PolicyLoss:
    """The objective of an `AlgorithmConfig`."""

    def __init__(
        self, config: AlgorithmConfig, max_new_tokens: int, *, version: int = 0, kl_coef: float | None = None
    ) -> None:
        """Args:
        version: of the weights that the step starts from; ages of tokens are counted from it.
        kl_coef: replaces the coefficient of the config, where it adapts.
        """
        self.needs_entropy = config.entropy_coef != 0
        self._mode: AggregationMode = config.aggregation
        self._max_tokens = max_new_tokens
        self._proximal: ProximalName = config.proximal
        self._version = version
        self._settings = objective_settings(config, kl_coef)

    def denominator(self, loss_counts: IntArray) -> float:
        """See `LossFunction`."""
        return _denominator(loss_counts, self._mode)

    def __call__(self, view: LossView, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossFunction`."""
        assert view.advantages is not None, "a policy loss needs advantages"
        token_losses, metrics = policy_loss(self.inputs(view), self._settings)
        return aggregate_loss(token_losses, view.loss_mask, self._mode, self._max_tokens, denominator), metrics

    def inputs(self, view: LossView) -> LossInputs:
        """Return what the objective reads of a view: which policy is the proximal one is decided here."""
        assert view.advantages is not None, "a policy loss needs advantages"
        current = view.logprobs.detach()
        if self._proximal == "sampler":
            proximal = view.sampler_logprobs
        elif self._proximal == "loglinear":
            assert view.token_versions is not None, "an interpolation by age needs the versions of tokens"
            proximal = loglinear_proximal(
                current, view.sampler_logprobs, view.token_versions, view.loss_mask, self._version
            )
        else:
            proximal = current if view.proximal_logprobs is None else view.proximal_logprobs
        return LossInputs(
            logprobs=view.logprobs,
            proximal_logprobs=proximal,
            sampler_logprobs=view.sampler_logprobs,
            trainer_logprobs=None if self._proximal == "recompute" else current,
            ref_logprobs=view.ref_logprobs,
            entropy=view.entropy,
            advantages=view.advantages,
            loss_mask=view.loss_mask,
            held_back=view.held_back,
        )

    @property
    def chooses_tokens(self) -> bool:
        """Whether the objective treats some tokens apart, which are to be chosen over the whole optimizer step."""
        return self._settings.objective in SELECTIONS

    def choose_tokens(self, view: LossView, generator: torch.Generator | None = None) -> Tensor | None:
        """Return `LossView.held_back` for a view of the whole optimizer step; None for objectives that choose none."""
        return select_tokens(self.inputs(view), self._settings, generator)


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


def objective_settings(config: AlgorithmConfig, kl_coef: float | None = None) -> ObjectiveSettings:
    """Return the numbers of `policy_loss` for a config; no importance weights where the sampler is the centre."""
    by_sampler = config.proximal == "sampler"
    coef = config.kl.coef if kl_coef is None else kl_coef
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
        kl_coef=coef if config.kl.place == "loss" else 0.0,
        kl_form=config.kl.form,
        kl_clamp_log_ratio=config.kl.clamp_log_ratio,
        kl_clamp_value=config.kl.clamp_value,
        entropy_coef=config.entropy_coef,
    )


def assign_advantages(
    batch: TrainBatch, config: AlgorithmConfig, student_logprobs: FloatArray | None = None
) -> TrainBatch:
    """Return the batch with advantages and, where a critic learns them, returns; the same on every rank.

    They are computed over the whole batch. `gae` needs values, `distillation` the teacher's logprobs.

    Args:
        student_logprobs: [sum T] of the policy that is trained, for `distillation`; that which sampled when None.
    """
    mask, critic = columns_mask(batch), config.critic
    advantages, returns = compute_advantages(
        AdvantageInputs(
            rewards=torch.from_numpy(batch.rewards.astype(np.float32)),
            group_ids=torch.from_numpy(batch.group_ids),
            loss_mask=mask,
            values=_columns(batch, batch.values),
            teacher_logprobs=_columns(batch, batch.teacher_logprobs),
            sampler_logprobs=_columns(batch, batch.logprobs if student_logprobs is None else student_logprobs),
            kl=_columns(batch, batch.token_penalties),
        ),
        AdvantageSettings(
            advantage=config.advantage,
            scale=config.advantage_scale,
            eps=config.advantage_eps,
            k=config.pass_k,
            threshold=config.pass_threshold,
            kl_coef=1.0,
            gamma=1.0 if critic is None else critic.gamma,
            lam=1.0 if critic is None else critic.lam,
        ),
    )
    if critic is not None and critic.whiten:
        advantages = masked_whiten(advantages, mask)
    if config.advantage == "distillation":
        # The mean, minus the estimated KL, as a baseline: without it nearly every token would be pushed down.
        advantages = torch.where(mask, advantages - safe_mean(advantages, mask), 0.0)
    return replace(
        batch,
        advantages=to_flat(batch, advantages),
        returns=None if returns is None else to_flat(batch, returns),
    )


def _columns(batch: TrainBatch, flat: FloatArray | None) -> Tensor | None:
    return None if flat is None else to_columns(batch, flat)


def batch_advantages(batch: TrainBatch, config: AlgorithmConfig) -> FloatArray:
    """Return [sum T] advantages of the loss-carrying tokens, as `assign_advantages` gives them."""
    advantages = assign_advantages(batch, config).advantages
    assert advantages is not None, "advantages were assigned"
    return advantages


def _denominator(loss_counts: IntArray, mode: AggregationMode) -> float:
    """Return tokens for `token_mean`, else trajectories with a token; as `loss_denominator`, on counts."""
    return float(loss_counts.sum() if mode == "token_mean" else (loss_counts > 0).sum())
