"""What to do about a member that failed: pure decisions from observations; the supervisor acts on them.

    heartbeats ──judge_health──> fault ──decide──> ruling

Faults count by role and time window. Within the budget a member is replaced, the first time at once, then after a
pause that doubles. Beyond it the run goes on without the member as long as enough others are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum


class FaultCause(Enum):
    """What is wrong with a member."""

    DIED = "its process is gone"
    FAILED = "it reports a failure that only a new one can repair"
    SILENT = "it does not answer"
    STALLED = "it has work and makes no progress"
    WRONG_WEIGHTS = "it did not receive the weights that were sent"
    NOT_STARTED = "it did not start"


class Decision(Enum):
    """What becomes of a member that failed."""

    REPLACE = "kill what is left of it and start another one in its place, after the pause that the ruling names"
    GO_ON_WITHOUT = "kill what is left of it; the others do its work"
    STOP_RUN = "kill what is left of it and end the run: too few members are left and no replacement is allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Budget of one role.

    Example: `RestartLimits(restarts=10, window_s=3600.0, backoff_s=1.0, max_backoff_s=60.0, min_members=1)`.
    """

    restarts: int
    """Replacements within the window."""
    window_s: float
    backoff_s: float
    """Pause before the second replacement within the window."""
    max_backoff_s: float
    min_members: int
    """Members without which the role cannot do its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """A decision with its reason."""

    decision: Decision
    pause_s: float
    """Before the replacement is started; 0 for the other decisions."""
    reason: str
    """One sentence with the numbers that led here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    """Times at which members of one role were replaced, on one monotonic clock, ascending."""

    times: tuple[float, ...] = ()

    def within(self, window_s: float, now: float) -> int:
        """Return how many lie in the window that ends now."""
        return sum(now - time < window_s for time in self.times)

    def add(self, now: float, window_s: float) -> "RestartHistory":
        """Return the history with one more; what has left the window is forgotten."""
        return replace(self, times=(*(time for time in self.times if now - time < window_s), now))


def decide(
    cause: FaultCause, *, role: str, num_live: int, history: RestartHistory, limits: RestartLimits, now: float
) -> Ruling:
    """Return what becomes of a member of `role` that failed.

    Args:
        num_live: members of the role that work, without the failed one; those that are being started do not count.
        history: earlier replacements of the role.
        now: on the clock of `history`.
    """
    used = history.within(limits.window_s, now)
    budget = f"{used} of supervision.restarts={limits.restarts} are used within {limits.window_s:g} s"
    if used < limits.restarts:
        pause_s = backoff(used, limits)
        return Ruling(decision=Decision.REPLACE, pause_s=pause_s, reason=f"{cause.value}; {budget}")
    needed = f"{num_live} of {role} are left, {limits.min_members} are needed"
    decision = Decision.GO_ON_WITHOUT if num_live >= limits.min_members else Decision.STOP_RUN
    return Ruling(decision=decision, pause_s=0.0, reason=f"{cause.value}; {budget}; {needed}")


def backoff(used: int, limits: RestartLimits) -> float:
    """Return the pause before the next replacement after `used` ones within the window: 0, b, 2b, 4b, ..."""
    if used == 0:
        return 0.0
    # The exponent is bounded: beyond it the cap holds anyway, and the float would overflow.
    return min(limits.max_backoff_s, limits.backoff_s * 2.0 ** min(used - 1, 60))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one member answered, or that it did not.

    Example: `Heartbeat(answered=True, has_work=True, progress=900, failure=None)`.
    """

    answered: bool
    has_work: bool = False
    """Requests or groups are under way, and it is not paused."""
    progress: int = 0
    """A count that grows while it works, such as sampled tokens."""
    failure: str | None = None
    """What it says made it fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What is known about one member, on one monotonic clock."""

    answered_at: float
    """Last answer; at first the time of its start."""
    moved_at: float
    """Last time that it had no work, or more progress than before."""
    progress: int = 0
    failure: str | None = None

    def after(self, beat: Heartbeat, now: float) -> "Health":
        """Return the health after one more heartbeat."""
        if not beat.answered:
            return self
        moved = not beat.has_work or beat.progress != self.progress
        return Health(
            answered_at=now,
            moved_at=now if moved else self.moved_at,
            progress=beat.progress,
            failure=beat.failure,
        )


def judge_health(health: Health, *, now: float, silence_s: float, stall_s: float) -> tuple[FaultCause, str] | None:
    """Return the fault with a sentence for people, or None if nothing is wrong."""
    if health.failure is not None:
        return FaultCause.FAILED, health.failure
    silent_s = now - health.answered_at
    if silent_s > silence_s:
        return FaultCause.SILENT, f"no heartbeat for {silent_s:.1f} s, supervision.silence_s={silence_s:g}"
    # Unanswered heartbeats say nothing about progress: a stall is judged up to the last answer.
    stalled_s = health.answered_at - health.moved_at
    if stalled_s > stall_s:
        return (
            FaultCause.STALLED,
            f"work and no progress for {stalled_s:.1f} s, supervision.stall_s={stall_s:g}",
        )
    return None


def blame(deaths: Sequence[str], refusals: Sequence[str], silent: Sequence[str]) -> tuple[str, ...]:
    """Return which engines a failed publication is laid to: first-hand causes before those that may be consequences.

    An engine that died or refused explains why others were left waiting; without one, whoever did not answer is to
    blame. None of them: nobody, and the publication is simply tried again.
    """
    first_hand = (*deaths, *refusals)
    return tuple(dict.fromkeys(first_hand or silent))
