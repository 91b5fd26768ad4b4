"""Was every version acknowledged by every live engine, with one digest?"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayrl.audit.finding import Finding, judge
from rayrl.audit.run_record import RunRecord
from rayrl.audit.step_view import step_views
from rayrl.checkpoint.ledger import SENDER
from rayrl.checkpoint.ledger_events import ENGINE_LOST, ENGINE_REMOVED, RUN_STARTED
from rayrl.checkpoint.ledger_reader import LedgerRecord, PublicationRow

CLAIM = "every version was acknowledged by every live engine, with one digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One publication: what each engine said in one transaction."""

    version: int
    position: int
    sent: str | None
    """Digest of what the trainer sent; None in ledgers that do not tell."""
    arrived: Mapping[str, str]
    """Digest by engine that acknowledged the version."""
    silent: tuple[str, ...]
    is_live: bool

    @property
    def digests(self) -> tuple[str, ...]:
        """The different ones, in alphabetical order."""
        return tuple(sorted({*self.arrived.values(), *(() if self.sent is None else (self.sent,))}))

    @property
    def acknowledged(self) -> tuple[str, ...]:
        """The engines that have the version."""
        return tuple(self.arrived)


def check_publications(run: RunRecord) -> Finding:
    """Return whether each trained version reached all engines as it was sent.

    An engine is live from its first acknowledgement until an event of the ledger says that it left, or until another
    process goes on with the run. Publications that a rewind superseded are looked at as well: they happened.
    """
    rounds = publication_rounds(run.ledger)
    violations = _digest_faults(run.ledger, rounds) + _membership_faults(run.ledger, rounds)
    published = {item.version for item in rounds if item.is_live and item.acknowledged}
    wanted = {0, *(view.row.version for view in step_views(run))} if run.ledger.steps else published
    violations += [f"version {version} was never published" for version in sorted(wanted - published)]
    return judge("publications", CLAIM, violations)


def publication_rounds(ledger: LedgerRecord) -> list[Round]:
    """Return all publications in the order in which they happened."""
    grouped: dict[tuple[int, int], list[PublicationRow]] = defaultdict(list)
    for row in ledger.publications:
        grouped[row.stamp.position, row.version].append(row)
    return [
        Round(
            version=version,
            position=position,
            sent=next((row.digest for row in rows if row.engine == SENDER), None),
            arrived={row.engine: row.digest for row in rows if row.acknowledged and row.engine != SENDER},
            silent=tuple(row.engine for row in rows if not row.acknowledged),
            is_live=all(row.stamp.superseded_by is None for row in rows),
        )
        for (position, version), rows in sorted(grouped.items())
    ]


def _digest_faults(ledger: LedgerRecord, rounds: Sequence[Round]) -> list[str]:
    """Within one process: the next one may cut the same weights into other buckets, which have other digests."""
    starts = [event.position for event in ledger.events if event.kind == RUN_STARTED]
    faults = []
    live: dict[int, str] = {}
    before = 0
    for item in rounds:
        if any(before < start <= item.position for start in starts):
            live = {}
        before = item.position
        if len(item.digests) > 1:
            faults.append(f"version {item.version} arrived with {len(item.digests)} digests: {_who_got_what(item)}")
        elif item.digests and item.is_live:
            known = live.setdefault(item.version, item.digests[0])
            if known != item.digests[0]:
                faults.append(
                    f"version {item.version} has two digests in two publications: {_short((known, item.digests[0]))}"
                )
    return faults


def _membership_faults(ledger: LedgerRecord, rounds: Sequence[Round]) -> list[str]:
    """Replay who was there: every engine must answer, or have left by then (or be told of right after)."""
    left = [
        (event.position, str(event.detail["engine"]))
        for event in ledger.events
        if event.kind in (ENGINE_LOST, ENGINE_REMOVED)
    ]
    starts = [event.position for event in ledger.events if event.kind == RUN_STARTED]
    faults = []
    members: set[str] = set()
    version: int | None = None
    for index, item in enumerate(rounds):
        before = rounds[index - 1].position if index else 0
        after = rounds[index + 1].position if index + 1 < len(rounds) else ledger.position + 1
        if any(before < start <= item.position for start in starts):
            members, version = set(), None
        # A push of the version in use goes only to those that join.
        is_push = item.version == version
        gone = {engine for position, engine in left if before < position < after}
        expected = set() if is_push else members - gone
        for engine in sorted((expected - set(item.acknowledged)) | (set(item.silent) - gone)):
            faults.append(
                f"version {item.version} was not acknowledged by {engine}, and no event says that this engine left"
            )
        members = (members - gone) | set(item.acknowledged)
        version = item.version
    return faults


def _who_got_what(item: Round) -> str:
    """Return what was sent and what else arrived, and where."""
    told = [] if item.sent is None else [f"sent {item.sent[:16]}"]
    told += [f"{engine} acknowledged {digest[:16]}" for engine, digest in item.arrived.items() if digest != item.sent]
    return "; ".join(told)


def _short(digests: Sequence[str]) -> str:
    return ", ".join(digest[:16] for digest in digests)
