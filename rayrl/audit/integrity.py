"""Are the records whole and as they were written? The chain, the rewinds, and what other files know of the ledger."""

from collections.abc import Mapping

from rayrl.audit.finding import Finding, judge
from rayrl.audit.run_record import RunRecord
from rayrl.checkpoint.ledger import REWIND
from rayrl.checkpoint.ledger_chain import first_broken_link
from rayrl.checkpoint.ledger_reader import LedgerRecord, Stamp

CLAIM = "no record was changed, removed or slipped in"


def check_integrity(run: RunRecord) -> Finding:
    """Return whether the records are as they were written."""
    ledger = run.ledger
    violations = [f"ledger.sqlite is damaged: {fault}" for fault in ledger.faults]
    violations += unusable(run.unreadable)
    violations += _guard_faults(ledger) + _chain_faults(ledger) + _rewind_faults(ledger) + _supersession_faults(ledger)
    violations += _checkpoint_faults(run) + _foreign_rollouts(run)
    missing = "" if ledger.format > 1 else "a hash chain: this ledger was written by a rayrl that kept none"
    return judge("integrity", CLAIM, violations, missing)


def unusable(faults: Mapping[str, str]) -> list[str]:
    """Return a violation for each file that cannot be used, given why."""
    return [f"{name} cannot be used: {reason}" for name, reason in faults.items()]


def _guard_faults(ledger: LedgerRecord) -> list[str]:
    if not ledger.missing_guards:
        return []
    return [
        f"ledger.sqlite was made append-only by triggers and unique indexes, and {len(ledger.missing_guards)} of them "
        f"were removed or changed since: {', '.join(ledger.missing_guards)}"
    ]


def _chain_faults(ledger: LedgerRecord) -> list[str]:
    if ledger.format < 2:
        return []
    faults = []
    broken = first_broken_link(ledger.links, ledger.chained)
    if broken is not None:
        rows = ledger.chained.get(broken, {})
        what = ", ".join(f"{len(rows[table])} in {table}" for table in rows) or "none"
        faults.append(
            f"ledger transaction {broken} does not match its link of the hash chain (rows there now: {what}): "
            "a row was edited, removed or slipped in there"
        )
    last = ledger.links[-1][0] if ledger.links else 0
    if last != ledger.position:
        faults.append(
            f"the ledger counts {ledger.position} transactions, its chain ends at {last}: the end was cut off"
        )
    gaps = [
        after for (before, _), (after, _) in zip(ledger.links, ledger.links[1:], strict=False) if after > before + 1
    ]
    faults += [f"the hash chain has no link before transaction {position}: one was removed" for position in gaps]
    return faults


def _rewind_faults(ledger: LedgerRecord) -> list[str]:
    told = [
        (event.detail["generation"], event.detail["position"], event.detail["superseded"])
        for event in ledger.events
        if event.kind == REWIND
    ]
    # Ledgers of format 1 have rewinds without events; they come first.
    kept = list(ledger.rewinds)[len(ledger.rewinds) - len(told) :] if told else []
    faults = [] if kept == told else [f"the rewinds {list(ledger.rewinds)} are not those that were recorded, {told}"]
    if ledger.format > 1 and ledger.generation != len(ledger.rewinds):
        faults.append(f"the ledger is in generation {ledger.generation} after {len(ledger.rewinds)} rewinds")
    return faults


def _supersession_faults(ledger: LedgerRecord) -> list[str]:
    """A row is superseded by the first later rewind to a position before it, and by nothing else."""
    stamped = [(f"step {row.step}", row.stamp) for row in ledger.steps]
    stamped += [(f"prompt {row.prompt_id}", row.stamp) for row in ledger.prompts]
    stamped += [(f"publication of version {row.version} to {row.engine}", row.stamp) for row in ledger.publications]
    faults = []
    for name, stamp in stamped:
        expected = _expected_mark(ledger, stamp)
        if stamp.superseded_by != expected:
            faults.append(
                f"{name} (transaction {stamp.position}) is marked superseded by {stamp.superseded_by}, "
                f"from the rewinds it is {expected}"
            )
    return faults


def _expected_mark(ledger: LedgerRecord, stamp: Stamp) -> int | None:
    later = (
        generation
        for generation, position, _ in ledger.rewinds
        if generation > stamp.generation and position < stamp.position
    )
    return min(later, default=None)


def _checkpoint_faults(run: RunRecord) -> list[str]:
    faults = []
    links = dict(run.ledger.links)
    for name, state in run.checkpoints.items():
        if state.ledger_position > run.ledger.position:
            faults.append(
                f"checkpoints/{name} was made at ledger position {state.ledger_position}, the ledger ends at "
                f"{run.ledger.position}: its end was cut off, or it is an older copy"
            )
            continue
        head = state.extra.get("ledger_head")
        if run.ledger.format > 1 and head is not None and links.get(state.ledger_position) != head:
            faults.append(
                f"checkpoints/{name} knows another link at ledger position {state.ledger_position}: "
                "the ledger before it was written anew"
            )
    return faults


def _foreign_rollouts(run: RunRecord) -> list[str]:
    known = {row.step for row in run.ledger.steps}
    return [
        f"rollouts/step_{step:06d}.parquet is there, but the ledger knows no step {step}: its end was cut off"
        for step in run.rollouts
        if step not in known
    ]
