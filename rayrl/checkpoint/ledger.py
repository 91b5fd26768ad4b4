"""The ledger: what became of every prompt and every published version, append-only.

SQLite, since a step is one transaction: after a kill the file holds whole steps only, and "exactly once" is a unique
index, not a promise. Journal mode WAL, so that an audit can read while the run writes (where the file system has no
WAL, SQLite keeps its rollback journal, which is as safe). `synchronous=NORMAL`: a process that is killed loses nothing,
a power cut may take the last transactions, the newest first. Those of steps that no checkpoint holds are done again
after a resume anyway; before a checkpoint is committed, `sync` puts all that it counts on the disk, so that none ever
knows of more than the ledger. A step therefore waits for no disk. Each transaction ends with a link of the hash chain
(`ledger_chain`), so that a row that was edited, removed or slipped in is found by an audit.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rayrl.checkpoint.ledger_chain import link_digest
from rayrl.checkpoint.ledger_file import as_checkpoint_error, chain_head, check_header, upgrade
from rayrl.checkpoint.ledger_schema import REWINDABLE, SCHEMA_VERSION, creation_script
from rayrl.errors import CheckpointError
from rayrl.types.prompt import PromptId

Outcome = Literal["trained", "filtered", "given_up"]
SENDER = "trainer"
"""Stands for the trainer among the names of engines in `publications`; older ledgers have no such rows."""
_LAZY = "NORMAL"
REWIND = "rewind"
"""Kind of the event that a rewind leaves; its detail has generation, position and the number of superseded rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutcome:
    """What became of one prompt.

    Example: `PromptOutcome(prompt_id=PromptId(dataset="sums", epoch=0, ordinal=3), outcome="trained",
    oldest_version=4, newest_version=5)`.
    """

    prompt_id: PromptId
    outcome: Outcome
    reason: str = ""
    """Why it was filtered or given up."""
    attempts: int = 1
    oldest_version: int | None = None
    """Among the loss-carrying tokens of the group; None if there are none."""
    newest_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutcome:
    """An outcome with the step that recorded it and the version that was trained."""

    outcome: PromptOutcome
    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """A version that became current, with what each engine received.

    Example: `PublishedVersion(version=3, sent="9f3c", acknowledged={"inference-0": "9f3c"}, missing=("inference-1",))`.
    """

    version: int
    sent: str
    """Digest of what the trainer sent."""
    acknowledged: Mapping[str, str]
    """By engine, the digest of what arrived there, as the engine computed it."""
    missing: Sequence[str] = ()
    """Engines that took part and failed."""


@dataclass(slots=True, kw_only=True)
class _Transaction:
    """What an open transaction stamps its rows with, and the rows so far."""

    position: int
    generation: int
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)


class Ledger:
    """One ledger file. One process writes; its threads may share the object. All methods raise CheckpointError."""

    def __init__(self, connection: sqlite3.Connection, path: Path, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._path = path
        self._clock = clock
        # A step is recorded off the event loop, since it waits for the disk.
        self._lock = threading.Lock()
        self._open: _Transaction | None = None

    @classmethod
    def open(cls, path: str | Path, read_only: bool = False, clock: Callable[[], float] = time.time) -> "Ledger":
        """Open a ledger, or make an empty one if there is none and `read_only` is not set."""
        file = Path(path)
        if read_only and not file.is_file():
            raise CheckpointError(f"there is no ledger at {file}")
        uri = f"{file.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        with as_checkpoint_error(file):
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            try:
                if not read_only:
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.execute(f"PRAGMA synchronous = {_LAZY}")
                    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                        connection.executescript(creation_script())
                if check_header(connection, file) < SCHEMA_VERSION and not read_only:
                    upgrade(connection)
            except BaseException:
                connection.close()
                raise
        return cls(connection, file, clock)

    def record_step(
        self,
        step: int,
        version: int,
        outcomes: Iterable[PromptOutcome],
        detail: Mapping[str, Any] | None = None,
        published: PublishedVersion | None = None,
    ) -> None:
        """Record a training step and all outcomes that it decides, in one transaction: all of it or nothing.

        `version` is the version that the step made, `published` its publication, if that is not recorded by itself;
        `detail` holds JSON-able facts for an audit, such as denominators.
        Raises CheckpointError if the step or one of the prompts has a live outcome already: exactly once.
        """
        with self._transaction():
            if published is not None:
                self._insert_publication(published, step)
            self._insert("steps", step, version, json.dumps(dict(detail or {})), self._clock())
            self._insert_outcomes(step, version, outcomes)

    def record_outcomes(self, step: int, version: int, outcomes: Iterable[PromptOutcome]) -> None:
        """Record outcomes that fall between two steps, such as groups given up; `step` is the last finished one."""
        with self._transaction():
            self._insert_outcomes(step, version, outcomes)

    def record_publication(self, published: PublishedVersion, *, step: int | None = None) -> None:
        """Record what was sent and which engines acknowledged what.

        `step` is the training step that made the version, the last recorded one if not given. A version may be
        published again, to an engine that joined or after a resume.
        """
        with self._transaction():
            self._insert_publication(published, self._last_step() if step is None else step)

    def record_event(self, kind: str, step: int, detail: Mapping[str, Any]) -> None:
        """Record a failure or a decision; `detail` is JSON-able."""
        with self._transaction():
            self._insert("events", kind, step, json.dumps(dict(detail)), self._clock())

    def rewind_to(self, step: int, *, min_position: int) -> int:
        """Supersede everything after a position, as a resume from the checkpoint of `step` does; return how many rows.

        `min_position` is the ledger's position when the checkpoint was made (0: resume without one). It decides, not
        the step: a prompt given up right after step 10 belongs to a checkpoint of step 10 or not, depending on which
        came first. The rows stay, marked with the new generation. CheckpointError if this ledger has not reached the
        position, and so is not the one that the checkpoint was made with.
        """
        with self._transaction() as transaction:
            position = transaction.position - 1
            if position < min_position:
                raise CheckpointError(
                    f"ledger {self._path} is at position {position}, the checkpoint of step {step} at {min_position}: "
                    "it is an older copy or of another run"
                )
            new = transaction.generation + 1
            superseded = 0
            for table in REWINDABLE:
                sql = f"UPDATE {table} SET superseded_by = ? WHERE position > ? AND superseded_by IS NULL"
                superseded += self._connection.execute(sql, (new, min_position)).rowcount
            now = self._clock()
            row = (new, step, min_position, superseded, now)
            self._connection.execute("INSERT INTO rewinds VALUES (?, ?, ?, ?, ?)", row)
            detail = {"generation": new, "position": min_position, "superseded": superseded}
            self._insert("events", REWIND, step, json.dumps(detail), now)
            self._connection.execute("UPDATE meta SET value = ? WHERE name = 'generation'", (new,))
        return superseded

    def counts(self, epoch: int | None = None) -> dict[str, int]:
        """Return the number of live outcomes by kind, and of superseded ones, of one epoch or of all."""
        where, values = ("", ()) if epoch is None else ("WHERE epoch = ?", (epoch,))
        result: dict[str, int] = {"trained": 0, "filtered": 0, "given_up": 0, "superseded": 0}
        sql = f"""SELECT CASE WHEN superseded_by IS NULL THEN outcome ELSE 'superseded' END AS kind, count(*)
                  FROM prompts {where} GROUP BY kind"""
        result.update(self._rows(sql, values))
        return result

    def outcomes(self, epoch: int | None = None) -> list[RecordedOutcome]:
        """Return the live outcomes of an epoch, or of all, by dataset, epoch and ordinal."""
        where, values = ("", ()) if epoch is None else ("AND epoch = ?", (epoch,))
        sql = f"""SELECT dataset, epoch, ordinal, outcome, reason, attempts, oldest_version, newest_version, step,
                  version FROM prompts WHERE superseded_by IS NULL {where} ORDER BY dataset, epoch, ordinal"""
        return [
            RecordedOutcome(
                outcome=PromptOutcome(
                    prompt_id=PromptId(dataset=row[0], epoch=row[1], ordinal=row[2]),
                    outcome=row[3],
                    reason=row[4],
                    attempts=row[5],
                    oldest_version=row[6],
                    newest_version=row[7],
                ),
                step=row[8],
                version=row[9],
            )
            for row in self._rows(sql, values)
        ]

    @property
    def position(self) -> int:
        """Transactions written since the ledger was made; it never falls."""
        with self._reading():
            return self._meta("position")

    @property
    def head(self) -> str:
        """The last link of the hash chain; whoever keeps it can tell later that the ledger up to here is unchanged."""
        with self._reading():
            return chain_head(self._connection)

    @property
    def last_step(self) -> int:
        """The last live step; 0 before the first."""
        with self._reading():
            return self._last_step()

    def sync(self) -> None:
        """Return once all transactions so far survive a power cut; to be called off the event loop."""
        with self._reading():
            connection = self._connection
            connection.execute("PRAGMA synchronous = FULL")
            try:
                # Its commit puts the whole journal on the disk, with all that is in there before it. SQLite skips a
                # write that changes nothing: there is something to put there only if the position has changed.
                connection.execute("INSERT OR REPLACE INTO meta VALUES ('synced', ?)", (self._meta("position"),))
            finally:
                connection.execute(f"PRAGMA synchronous = {_LAZY}")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._reading():
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[_Transaction]:
        """One write transaction: counts the position, adds a link at its end, rolls back on any exception."""
        with self._reading():
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                position, generation = self._meta("position") + 1, self._meta("generation")
                self._open = _Transaction(position=position, generation=generation)
                yield self._open
                connection.execute("UPDATE meta SET value = ? WHERE name = 'position'", (position,))
                digest = link_digest(chain_head(connection), self._open.rows)
                connection.execute("INSERT INTO chain VALUES (?, ?)", (position, digest))
                connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some errors, a full disk among them.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            finally:
                self._open = None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, as_checkpoint_error(self._path):
            yield

    def _insert(self, table: str, *values: Any) -> None:
        """Insert one row, stamped with the position of the open transaction and the generation."""
        transaction = self._open
        assert transaction is not None, "rows are inserted inside a transaction"
        stamped = (*values, transaction.position, transaction.generation)
        row = (None, *stamped, None) if table in REWINDABLE else (None, *stamped)
        transaction.rows.setdefault(table, []).append(stamped)
        try:
            self._connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        except sqlite3.IntegrityError as error:
            raise CheckpointError(f"ledger {self._path}, table {table}: {error}; the row was {values}") from error

    def _insert_publication(self, published: PublishedVersion, step: int) -> None:
        """The sender's row comes first and has its name: what was sent, for a comparison with what arrived."""
        now = self._clock()
        for name, digest in ((SENDER, published.sent), *published.acknowledged.items()):
            self._insert("publications", published.version, step, name, digest, 1, now)
        for engine in published.missing:
            self._insert("publications", published.version, step, engine, published.sent, 0, now)

    def _insert_outcomes(self, step: int, version: int, outcomes: Iterable[PromptOutcome]) -> None:
        for item in outcomes:
            prompt = item.prompt_id
            key = (prompt.dataset, prompt.epoch, prompt.ordinal)
            sql = """SELECT outcome, step FROM prompts
                     WHERE dataset = ? AND epoch = ? AND ordinal = ? AND superseded_by IS NULL"""
            earlier = self._connection.execute(sql, key).fetchone()
            if earlier is not None:
                raise CheckpointError(
                    f"prompt {prompt} was {earlier[0]} in step {earlier[1]} and is now {item.outcome} in step {step}; "
                    "every prompt has exactly one outcome"
                )
            versions = (item.oldest_version, item.newest_version)
            self._insert("prompts", *key, item.outcome, item.reason, version, step, item.attempts, *versions)

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._reading():
            return self._connection.execute(sql, values).fetchall()

    def _meta(self, name: str) -> int:
        return int(self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()[0])

    def _last_step(self) -> int:
        row = self._connection.execute("SELECT max(step) FROM steps WHERE superseded_by IS NULL").fetchone()
        return int(row[0] or 0)
