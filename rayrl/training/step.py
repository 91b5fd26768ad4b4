"""One training step as the driver asks for it, and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass

LOGPROB_GAP = "mismatch/abs_logprob_diff"
"""Metric of the difference between the logprobs of engines and trainer: a mean per token where a step is done."""


def logprob_gap_fault(metrics: Mapping[str, float], num_tokens: float, limit: float | None) -> str | None:
    """Return what is wrong if engines and trainer are more than `limit` nats per token apart, else None.

    Args:
        metrics: of a step, with `LOGPROB_GAP` as a sum over its tokens; without it (supervised steps) nothing is wrong.
        num_tokens: tokens that carried loss.
        limit: None allows any difference.

    Example: `logprob_gap_fault({"mismatch/abs_logprob_diff": 40.0}, 2, 10.0)` says that they are 20 nats apart.
    """
    total = metrics.get(LOGPROB_GAP)
    if total is None or limit is None or num_tokens <= 0 or total / num_tokens <= limit:
        return None
    return (
        f"engines and trainer are {total / num_tokens:.3g} nats per token apart on the step's tokens, "
        f"training.max_logprob_gap={limit:g}: earlier updates were too large (lower training.optimizer.lr), or the "
        "engines hold other weights"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepRequest:
    """A training step on the batches that are given with it.

    Example: `TrainStepRequest(step=7, version=6, min_version=4)`.
    """

    step: int
    """Number of the step, for messages; the learning rate follows the engine's own count of optimizer steps."""
    version: int
    """Version of the weights that the step starts from; ages are counted from it."""
    min_version: int | None
    """Tokens sampled by an older version carry no loss; None keeps all."""
    kl_coef: float | None = None
    """Factor of the KL term in this step, where it adapts; None: that of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepResult:
    """What a training step did; the same on every rank, but for `seconds`."""

    skipped: bool
    """True if the weights are unchanged: every optimizer step of the training step was skipped."""
    reason: str | None
    """Why optimizer steps were skipped, the last one; None if none was."""
    metrics: dict[str, float]
    """Named `section/what`; means are per token that carries loss, over all ranks."""
    seconds: float
    """Duration in this worker."""
    num_tokens: int
    """Tokens that carried loss, over all ranks."""
    data_digest: str = ""
    """Of all trajectories of the step as they arrived (`checkpoint.group_digest`); empty but on rank 0."""
