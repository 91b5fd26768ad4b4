"""The whole policy loss of a micro-batch: surrogate, importance weights, KL, entropy, and the metrics to log.

    token loss = w(proximal / sampler) * objective(policy / proximal, A) + kl_coef * KL - entropy_coef * entropy

All parts are per token; `aggregate_loss` with a global denominator makes the number to call backward on.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rayrl.algorithms.importance import ImportanceMode, importance_weights
from rayrl.algorithms.kl import KlForm, kl_estimate
from rayrl.algorithms.masking import as_bool, live, live_advantages
from rayrl.algorithms.mismatch import mismatch_maxima, mismatch_sums
from rayrl.algorithms.nonfinite import nonfinite_report
from rayrl.algorithms.ratio import RatioLevel, exp_ratio, log_ratio, reduce_log_ratio
from rayrl.algorithms.signature import select_arguments
from rayrl.algorithms.tables import OBJECTIVES, RATIO_LEVELS, SELECTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a policy loss reads of one micro-batch. Values under the mask are ignored, whatever they are."""

    logprobs: Tensor
    """[N, T] log-probability of each token under the policy that is trained; carries the gradient."""
    proximal_logprobs: Tensor
    """[N, T] under the policy at the centre of the clip: the trainer's before the step, or the sampler's."""
    sampler_logprobs: Tensor
    """[N, T] as the engine reported them when it sampled."""
    trainer_logprobs: Tensor | None = None
    """[N, T] under the trainer's policy, which the gap to the sampler is measured from; None: the proximal ones are.
    To be given where those are the sampler's own, or interpolated."""
    ref_logprobs: Tensor | None = None
    """[N, T] under the reference; needed when `kl_coef` is not 0."""
    entropy: Tensor | None = None
    """[N, T] entropy of the policy's distribution, with gradient; needed when `entropy_coef` is not 0."""
    advantages: Tensor
    """[N, T], or [N, 1] for one per trajectory."""
    loss_mask: Tensor
    """[N, T] int or bool: 1 for sampled tokens that carry loss."""
    held_back: Tensor | None = None
    """[N, T] int or bool: tokens that an objective of `SELECTIONS` treats apart, chosen by `select_tokens` over the
    whole optimizer step; None: the objective chooses among the tokens given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """The numbers of a policy loss. An objective takes those that it names; the others have no effect on it."""

    objective: str = "ppo_clip"
    """A name in `OBJECTIVES`."""
    clip_low: float = 0.2
    """The defaults suit `ppo_clip`; `gspo` wants about 3e-4 and 4e-4, `cispo` 1.0 and 0.28, `gmpo` 0.4 and 0.4."""
    clip_high: float = 0.28
    dual_clip: float | None = None
    ratio_form: Literal["sequence", "token"] = "sequence"
    """GSPO: through what the gradient of the ratio flows."""
    tau_pos: float = 1.0
    """SAPO: how fast the gate closes, for positive and for negative advantages."""
    tau_neg: float = 1.05
    divergence: Literal["tv", "kl"] = "tv"
    """DPPO: measure of the trust region, and its radius."""
    divergence_threshold: float = 0.2
    second_moment: float = 0.04
    """M2PO: bound of the mean squared log ratio."""
    cov_share: float = 2e-4
    """Clip-Cov and KL-Cov: share of the live tokens that is held back."""
    cov_low: float = 1.0
    """Clip-Cov: band of covariances from which tokens are chosen."""
    cov_high: float = 5.0
    cov_kl_coef: float = 1.0
    """KL-Cov: factor of the penalty on the chosen tokens."""
    importance_level: RatioLevel | None = "token"
    """Level of the weights proximal / sampler; None for no weights (plain PPO, or proximal = sampler)."""
    importance_mode: ImportanceMode = "truncate"
    importance_low: float | None = None
    importance_high: float | None = 2.0
    rejection_level: RatioLevel | None = None
    """A first stage before the weights: tokens whose ratio at this level leaves the bounds lose their policy loss."""
    rejection_low: float | None = None
    rejection_high: float | None = None
    kl_coef: float = 0.0
    kl_form: KlForm = "k3"
    kl_clamp_log_ratio: float | None = None
    kl_clamp_value: float | None = None
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective: {self.objective!r} is not one of {', '.join(OBJECTIVES)}")


def policy_loss(inputs: LossInputs, settings: ObjectiveSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return per-token losses [N, T], 0 where the mask is 0, and 0-dim metrics of the live tokens.

    Metrics are sums (`num_tokens` is their number) and maxima (`section/max_what`), so that micro-batches and ranks add
    up by `add_metrics`; `mean_metrics` divides at the end. They carry no gradient and cause no transfer from the
    device. `nonfinite/NAME` counts NaN and inf of each input in live positions.

    Raises:
        ValueError: a coefficient is not 0 and its input is None.
    """
    mask = as_bool(inputs.loss_mask)
    arguments: dict[str, Any] = {
        **asdict(settings),
        "logprobs": inputs.logprobs,
        "old_logprobs": inputs.proximal_logprobs,
        "advantages": inputs.advantages,
        "loss_mask": mask,
        "held_back": inputs.held_back,
    }
    objective = OBJECTIVES[settings.objective]
    surrogate = objective(**select_arguments(objective, arguments))
    weights = _weights(inputs, settings, mask)
    # A rejected token may carry a loss near the largest float; the selection keeps inf * 0 = NaN out.
    losses = torch.where(weights == 0, 0.0, surrogate * weights)
    metrics = _metrics(inputs, settings, mask, weights)
    metrics["policy/loss"] = losses.detach().sum()
    if settings.kl_coef != 0:
        if inputs.ref_logprobs is None:
            raise ValueError(f"kl_coef: {settings.kl_coef} needs ref_logprobs, which are None; give them or set 0")
        kl = kl_estimate(
            inputs.logprobs,
            inputs.ref_logprobs,
            settings.kl_form,
            mask,
            settings.kl_clamp_log_ratio,
            settings.kl_clamp_value,
        )
        losses = losses + settings.kl_coef * kl
        metrics["policy/ref_kl"] = kl.detach().sum()
    if settings.entropy_coef != 0:
        if inputs.entropy is None:
            raise ValueError(f"entropy_coef: {settings.entropy_coef} needs entropy, which is None; give it or set 0")
        losses = losses - settings.entropy_coef * live(inputs.entropy, mask)
    if inputs.entropy is not None:
        metrics["policy/entropy"] = live(inputs.entropy.detach(), mask).sum()
    return losses, metrics


def select_tokens(
    inputs: LossInputs, settings: ObjectiveSettings, generator: torch.Generator | None = None
) -> Tensor | None:
    """Return `LossInputs.held_back` for the inputs of a whole optimizer step, [N, T] bool; None if nothing is chosen.

    Micro-batches that carry their part of it give the gradient of the whole batch, however it is cut.

    Args:
        inputs: logprobs of the policy as it is before this optimizer step; no gradient is needed.
        generator: source of the choice of `clip_cov`, on the device of the mask.
    """
    selection = SELECTIONS.get(settings.objective)
    if selection is None:
        return None
    arguments: dict[str, Any] = {
        **asdict(settings),
        "logprobs": inputs.logprobs.detach(),
        "old_logprobs": inputs.proximal_logprobs,
        "advantages": inputs.advantages,
        "loss_mask": as_bool(inputs.loss_mask),
        "generator": generator,
    }
    return selection(**select_arguments(selection, arguments))


def _weights(inputs: LossInputs, settings: ObjectiveSettings, mask: Tensor) -> Tensor:
    """Return importance weights times the rejection stage [N, T], without gradient."""
    weights = mask.to(torch.float32)
    if settings.importance_level is not None:
        weights = importance_weights(
            inputs.proximal_logprobs,
            inputs.sampler_logprobs,
            mask,
            settings.importance_level,
            settings.importance_mode,
            settings.importance_low,
            settings.importance_high,
        )
    if settings.rejection_level is not None:
        kept = importance_weights(
            inputs.proximal_logprobs,
            inputs.sampler_logprobs,
            mask,
            settings.rejection_level,
            "mask",
            settings.rejection_low,
            settings.rejection_high,
        )
        weights = torch.where(kept == 0, 0.0, weights)
    return weights


def _metrics(inputs: LossInputs, settings: ObjectiveSettings, mask: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return metrics of the live tokens that every objective shares."""
    with torch.no_grad():
        logs = log_ratio(inputs.logprobs, inputs.proximal_logprobs, mask)
        ratio = exp_ratio(logs)
        clip_level = RATIO_LEVELS.get(settings.objective, "token")
        clip_ratio = exp_ratio(reduce_log_ratio(logs, mask, clip_level))
        signal = live_advantages(inputs.advantages, mask)
        above = mask & (signal > 0) & (clip_ratio > 1 + settings.clip_high)
        below = mask & (signal < 0) & (clip_ratio < 1 - settings.clip_low)
        metrics = {
            "num_tokens": mask.sum().to(logs.dtype),
            "policy/ratio": torch.where(mask, ratio, 0.0).sum(),
            "policy/k1": -logs.sum(),
            "policy/k3": torch.where(mask, ratio - 1 - logs, 0.0).sum(),
            "policy/clipped_above": above.sum().to(logs.dtype),
            "policy/clipped_below": below.sum().to(logs.dtype),
            "policy/advantage": signal.sum(),
            "importance/weight": weights.sum(),
            "importance/zero": (mask & (weights == 0)).sum().to(logs.dtype),
        }
        if inputs.held_back is not None:
            metrics["policy/held_back"] = (mask & as_bool(inputs.held_back)).sum().to(logs.dtype)
        trainer = inputs.proximal_logprobs if inputs.trainer_logprobs is None else inputs.trainer_logprobs
        metrics |= mismatch_sums(trainer, inputs.sampler_logprobs, mask)
        metrics |= mismatch_maxima(trainer, inputs.sampler_logprobs, mask)
        counts = nonfinite_report(
            mask,
            logprobs=inputs.logprobs,
            proximal_logprobs=inputs.proximal_logprobs,
            sampler_logprobs=inputs.sampler_logprobs,
            ref_logprobs=inputs.ref_logprobs,
            entropy=inputs.entropy,
            advantages=inputs.advantages,
        )
        return metrics | {f"nonfinite/{name}": count.to(logs.dtype) for name, count in counts.items()}
