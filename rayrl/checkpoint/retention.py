"""Which checkpoints are kept. Pure; the store acts on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from rayrl.config.checkpoint import CheckpointConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """What is kept; a checkpoint is removed if no part of the rule asks for it.

    Example: `RetentionRule(keep_last=2, keep_every=100, metric="eval/accuracy", mode="max")`.
    """

    keep_last: int
    """The newest ones, in the order in which they were written."""
    keep_every: int = 0
    """Those of steps divisible by this; 0 is none."""
    metric: str | None = None
    """The best one by this metric, the newest among equals; None is none."""
    mode: Literal["max", "min"] = "max"

    @classmethod
    def of(cls, config: CheckpointConfig) -> Self:
        """Return the rule of a config."""
        return cls(
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            metric=config.keep_best,
            mode=config.keep_best_mode,
        )

    def __post_init__(self) -> None:
        assert self.keep_last > 0, "at least the newest checkpoint is kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the rule looks at."""

    serial: int
    """Order of writing."""
    step: int
    score: float | None
    """Value of the metric, measured on this checkpoint's version; None if it was not measured."""


def best(candidates: Sequence[Candidate], mode: Literal["max", "min"]) -> Candidate | None:
    """Return the candidate with the best score, the newest among equals; None if none has one."""
    sign = 1 if mode == "max" else -1
    scored = [(sign * item.score, item.serial, item) for item in candidates if item.score is not None]
    return max(scored, key=lambda entry: entry[:2], default=(0.0, 0, None))[2]


def to_remove(candidates: Sequence[Candidate], rule: RetentionRule) -> list[Candidate]:
    """Return the checkpoints that nothing asks to keep, oldest first."""
    ordered = sorted(candidates, key=lambda item: item.serial)
    kept = {item.serial for item in ordered[-rule.keep_last :]}
    if rule.keep_every > 0:
        kept |= {item.serial for item in ordered if item.step % rule.keep_every == 0}
    winner = best(ordered, rule.mode) if rule.metric is not None else None
    if winner is not None:
        kept.add(winner.serial)
    return [item for item in ordered if item.serial not in kept]
