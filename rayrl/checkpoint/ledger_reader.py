"""The whole ledger as plain rows, for an audit: live and superseded ones, links, and what SQLite says of the file."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrl.checkpoint.ledger import Outcome
from rayrl.checkpoint.ledger_chain import Rows
from rayrl.checkpoint.ledger_events import RUN_ENDED, RUN_FAILED, RUN_INTERRUPTED, RUN_STARTED
from rayrl.checkpoint.ledger_file import check_header, missing_guards, read_chained
from rayrl.errors import CheckpointError
from rayrl.types.prompt import PromptId

_COURSE = (RUN_STARTED, RUN_ENDED, RUN_FAILED, RUN_INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Where a row stands. A row is live while `superseded_by` is None."""

    position: int
    generation: int
    superseded_by: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """What became of a prompt."""

    prompt_id: PromptId
    outcome: Outcome
    reason: str
    version: int
    step: int
    oldest_version: int | None
    newest_version: int | None
    stamp: Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A training step; `detail` has its denominators."""

    step: int
    version: int
    detail: Mapping[str, Any]
    stamp: Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationRow:
    """What one engine said to one version."""

    version: int
    step: int
    engine: str
    digest: str
    acknowledged: bool
    stamp: Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """A failure or a decision."""

    kind: str
    step: int
    detail: Mapping[str, Any]
    position: int
    time: float
    """Seconds since the epoch."""


def last_of_run(events: Sequence[EventRow]) -> EventRow | None:
    """Return how the last process of a run ended, or its start if it recorded no end."""
    return next((event for event in reversed(events) if event.kind in _COURSE), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRecord:
    """All that a ledger holds, each table in the order written."""

    format: int
    position: int
    generation: int
    prompts: tuple[PromptRow, ...]
    steps: tuple[StepRow, ...]
    publications: tuple[PublicationRow, ...]
    events: tuple[EventRow, ...]
    rewinds: tuple[tuple[int, int, int], ...]
    """Generation, position that was gone back to, number of rows superseded."""
    links: tuple[tuple[int, str], ...]
    """Position and digest; empty in format 1."""
    chained: Mapping[int, Rows]
    """Rows by position as `ledger_chain` takes them."""
    faults: tuple[str, ...]
    """What SQLite finds wrong with the file itself."""
    missing_guards: tuple[str, ...]
    """Triggers and unique indexes that every ledger is made with and this one has no more."""

    @property
    def live_steps(self) -> list[StepRow]:
        """The steps that count, by number."""
        return sorted((row for row in self.steps if row.stamp.superseded_by is None), key=lambda row: row.step)

    @property
    def live_prompts(self) -> list[PromptRow]:
        """The outcomes that count."""
        return [row for row in self.prompts if row.stamp.superseded_by is None]


def read_ledger(path: Path) -> LedgerRecord:
    """Read a ledger, also while a run writes it. CheckpointError if it is missing, foreign, newer or damaged."""
    if not path.is_file():
        raise CheckpointError(f"there is no ledger at {path}")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        try:
            # One snapshot for all tables, whatever a run adds meanwhile.
            connection.execute("BEGIN")
            return _read(connection, path)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise CheckpointError(f"ledger {path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"ledger {path} holds a row that rayrl did not write: {error!r}") from error


def _read(connection: sqlite3.Connection, path: Path) -> LedgerRecord:
    version = check_header(connection, path)
    faults = [row[0] for row in connection.execute("PRAGMA integrity_check(5)") if row[0] != "ok"]
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    stamp = "position, generation, superseded_by"
    prompts = connection.execute(
        "SELECT dataset, epoch, ordinal, outcome, reason, version, step, oldest_version, newest_version, "
        f"{stamp} FROM prompts ORDER BY id"
    ).fetchall()
    steps = connection.execute(f"SELECT step, version, detail, {stamp} FROM steps ORDER BY id").fetchall()
    publications = connection.execute(
        f"SELECT version, step, engine, digest, acknowledged, {stamp} FROM publications ORDER BY id"
    ).fetchall()
    events = connection.execute("SELECT kind, step, detail, position, time FROM events ORDER BY id").fetchall()
    rewinds = connection.execute("SELECT generation, position, superseded FROM rewinds ORDER BY generation").fetchall()
    links = connection.execute("SELECT position, digest FROM chain ORDER BY position").fetchall() if version > 1 else []
    return LedgerRecord(
        format=version,
        position=meta["position"],
        generation=meta["generation"],
        prompts=tuple(_prompt(row) for row in prompts),
        steps=tuple(
            StepRow(step=row[0], version=row[1], detail=json.loads(row[2]), stamp=_stamp(row[3:])) for row in steps
        ),
        publications=tuple(
            PublicationRow(
                version=row[0],
                step=row[1],
                engine=row[2],
                digest=row[3],
                acknowledged=bool(row[4]),
                stamp=_stamp(row[5:]),
            )
            for row in publications
        ),
        events=tuple(
            EventRow(kind=row[0], step=row[1], detail=json.loads(row[2]), position=row[3], time=row[4])
            for row in events
        ),
        rewinds=tuple(rewinds),
        links=tuple(links),
        chained=read_chained(connection),
        faults=tuple(faults),
        missing_guards=tuple(missing_guards(connection)),
    )


def _prompt(row: tuple[Any, ...]) -> PromptRow:
    return PromptRow(
        prompt_id=PromptId(dataset=row[0], epoch=row[1], ordinal=row[2]),
        outcome=row[3],
        reason=row[4],
        version=row[5],
        step=row[6],
        oldest_version=row[7],
        newest_version=row[8],
        stamp=_stamp(row[9:]),
    )


def _stamp(values: tuple[Any, ...]) -> Stamp:
    return Stamp(position=values[0], generation=values[1], superseded_by=values[2])
