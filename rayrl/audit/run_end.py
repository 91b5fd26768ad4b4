"""How the last process of a run ended, from what it left. Pure."""

from enum import Enum

from rayrl.checkpoint.ledger_events import RUN_ENDED, RUN_FAILED, RUN_INTERRUPTED
from rayrl.checkpoint.ledger_reader import EventRow


class RunEnd(Enum):
    """How it ended."""

    RUNS = "runs"
    """It has not: a process holds the folder."""
    DONE = "done"
    """In order, with all its steps."""
    STOPPED = "stopped"
    """In order, by a signal, with its state saved."""
    INTERRUPTED = "interrupted"
    """By a second signal, before it could save."""
    FAILED = "failed"
    """With an error, after it had begun."""
    FAILED_AT_START = "failed at start"
    """With an error, before it recorded anything."""
    VANISHED = "vanished"
    """Without a word, after it had begun: killed, its machine lost, or on a full disk."""
    VANISHED_AT_START = "vanished at start"
    """Without a word, before it recorded anything."""
    UNKNOWN = "unknown"
    """Its ledger, which would tell, cannot be read, or is of a rayrl that recorded no ends."""


def run_end(*, is_alive: bool, is_recorded: bool, last: EventRow | None, failure: str | None) -> RunEnd:
    """Return how the last process ended.

    Args:
        is_recorded: whether the ledger tells how processes end; also true if none was ever begun.
        last: the last event of its course that it recorded itself; None if it recorded none.
        failure: what it left as `logs/failure.txt`, empty on a full disk; None if there is none.
    """
    if is_alive:
        return RunEnd.RUNS
    if not is_recorded:
        return RunEnd.UNKNOWN if failure is None else RunEnd.FAILED
    if last is None:
        return RunEnd.VANISHED_AT_START if failure is None else RunEnd.FAILED_AT_START
    if is_interrupted(last):
        return RunEnd.INTERRUPTED
    if last.kind == RUN_FAILED or failure is not None:
        return RunEnd.FAILED
    if last.kind == RUN_ENDED:
        return RunEnd.DONE if last.detail.get("status") == "done" else RunEnd.STOPPED
    return RunEnd.VANISHED


def is_interrupted(event: EventRow) -> bool:
    """Return whether an event says that the run was left at once."""
    is_old = event.kind == RUN_FAILED and str(event.detail.get("error", "")).startswith("CancelledError:")
    return event.kind == RUN_INTERRUPTED or is_old


def recorded_error(event: EventRow | None) -> str:
    """Return the error that a run ended with, in the words of its ledger; empty if it tells none."""
    if event is None or event.kind != RUN_FAILED or is_interrupted(event):
        return ""
    return str(event.detail.get("error", ""))
