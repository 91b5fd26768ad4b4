"""How far a run is: the counts that admission, batch forming and checkpoints share. One event loop owns them."""

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSnapshot:
    """The counts at one moment."""

    step: int
    version: int
    consumed: int
    outstanding: int


class Progress:
    """Steps, version and slots. Every change wakes the rollout loop, which may then have capacity."""

    def __init__(
        self,
        *,
        step: int = 0,
        version: int = 0,
        consumed: int = 0,
        outstanding: int = 0,
        kl_coef: float | None = None,
    ) -> None:
        self.step = step
        """Training steps that have finished."""
        self.version = version
        """Published weight version."""
        self.consumed = consumed
        """Groups in finished training steps that changed the weights."""
        self.outstanding = outstanding
        """Groups that hold a slot."""
        self.kl_coef = kl_coef
        """Coefficient of the KL penalty in the next step, where it adapts; None where it is fixed."""
        self.changed = asyncio.Event()

    def admit(self) -> None:
        """A group takes a slot, before its first token is sampled."""
        self.outstanding += 1

    def release(self, num_groups: int, *, consumed: bool) -> None:
        """Groups give their slots back: trained on (`consumed`), or dropped, filtered or given up."""
        assert self.outstanding >= num_groups, "more slots given back than were taken"
        self.outstanding -= num_groups
        if consumed:
            self.consumed += num_groups
        self.changed.set()

    def publish(self, version: int) -> None:
        """A version has become current on every engine."""
        assert version > self.version, f"version {version} does not follow {self.version}"
        self.version = version
        self.changed.set()

    def restore(self, *, step: int, version: int, consumed: int, outstanding: int) -> None:
        """Set all counts to those of a checkpoint."""
        self.step, self.version, self.consumed, self.outstanding = step, version, consumed, outstanding
        self.changed.set()

    def snapshot(self) -> ProgressSnapshot:
        """Return the counts."""
        return ProgressSnapshot(
            step=self.step, version=self.version, consumed=self.consumed, outstanding=self.outstanding
        )
