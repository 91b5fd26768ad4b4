"""Whose fault a failed publication is: pure judgement of the outcomes of one phase.

A collective fails on all its members when it fails on one. What a member raises itself, or its death, comes first;
that others lost their connection, or waited in vain, is a consequence.
"""

from collections.abc import Mapping, Sequence

from rayrl.driver.failure_policy import FaultCause, blame
from rayrl.errors import DeadlineExceeded, RayrlError, TransferError
from rayrl.infra.outcomes import CallOutcome, CallState


class Aborted(Exception):
    """One attempt at a publication failed before any engine used the new weights."""

    def __init__(self, error: RayrlError, culprits: Mapping[str, tuple[FaultCause, str]], is_fatal: bool) -> None:
        super().__init__(str(error))
        self.error = error
        """What went wrong first."""
        self.culprits = dict(culprits)
        """Engines to quarantine."""
        self.is_fatal = is_fatal
        """Another attempt would fail in the same way: the trainer, or the set-up, is at fault."""


def check_outcomes(
    outcomes: Sequence[CallOutcome], *, sender: str, is_collective: bool = False, is_first: bool = False
) -> None:
    """Return if every call succeeded, else raise `Aborted` with whom to blame.

    Args:
        outcomes: of one phase, over engines and training workers.
        sender: name of the training group.
        is_collective: the calls depend on one another; otherwise whoever fails is at fault itself.
        is_first: nothing was ever published; if then every engine refuses, new engines would do the same.
    """
    bad = [outcome for outcome in outcomes if outcome.state is not CallState.DONE]
    if not bad:
        return
    senders = [outcome for outcome in bad if outcome.member.startswith(f"{sender}-")]
    engines = [outcome for outcome in bad if outcome not in senders]
    for outcome in senders:
        if outcome.state is CallState.DIED or is_refusal(outcome):
            raise Aborted(error_of(outcome), {}, is_fatal=True)
    if is_first and len(bad) == len(outcomes) and all(map(is_refusal, engines)):
        raise Aborted(error_of(bad[0]), {}, is_fatal=True)
    culprits = blame(
        [outcome.member for outcome in engines if outcome.state is CallState.DIED],
        [outcome.member for outcome in engines if is_refusal(outcome) or _failed_alone(outcome, is_collective)],
        [outcome.member for outcome in engines if outcome.state is CallState.SILENT],
    )
    by_name = {outcome.member: outcome for outcome in bad}
    if culprits:
        faults = {name: fault_of(by_name[name]) for name in culprits}
        raise Aborted(error_of(by_name[culprits[0]]), faults, is_fatal=False)
    silent = [outcome for outcome in senders if outcome.state is CallState.SILENT]
    raise Aborted(error_of((silent or bad)[0]), {}, is_fatal=bool(silent))


def is_refusal(outcome: CallOutcome) -> bool:
    """Return True if a member raised what is its own fault, not the consequence of another one's."""
    return outcome.state is CallState.FAILED and not isinstance(outcome.error, TransferError | DeadlineExceeded)


def _failed_alone(outcome: CallOutcome, is_collective: bool) -> bool:
    return outcome.state is CallState.FAILED and not is_collective


def error_of(outcome: CallOutcome) -> RayrlError:
    """Return what went wrong in a call that failed."""
    assert outcome.error is not None, f"{outcome.member} did not fail"
    return outcome.error


def fault_of(outcome: CallOutcome) -> tuple[FaultCause, str]:
    """Return why a member is quarantined after a call that failed."""
    causes = {CallState.DIED: FaultCause.DIED, CallState.SILENT: FaultCause.SILENT}
    return causes.get(outcome.state, FaultCause.FAILED), str(error_of(outcome))
