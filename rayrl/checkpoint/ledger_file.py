"""A ledger as an SQLite file: its header, its chain, what an older format lacks. For those that write and that read."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayrl.checkpoint.ledger_chain import CHAINED, GENESIS, link_digest
from rayrl.checkpoint.ledger_schema import APPLICATION_ID, COLUMNS, SCHEMA_VERSION, creation_script, upgrade_statements
from rayrl.errors import CheckpointError


def read_chained(connection: sqlite3.Connection) -> dict[int, dict[str, list[tuple[Any, ...]]]]:
    """Return the rows of the chained tables by position and table, as `ledger_chain` takes them."""
    found: dict[int, dict[str, list[tuple[Any, ...]]]] = {}
    for table in CHAINED:
        columns = COLUMNS[table].split()
        place = columns.index("position")
        for row in connection.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY id"):
            found.setdefault(row[place], {}).setdefault(table, []).append(tuple(row))
    return found


def missing_guards(connection: sqlite3.Connection) -> list[str]:
    """Return the names of the triggers and unique indexes that hold the rules of a ledger and are not there, or are
    not what they were made as."""
    query = "SELECT name, sql FROM sqlite_master WHERE type IN ('trigger', 'index') AND sql IS NOT NULL"
    whole = sqlite3.connect(":memory:")
    try:
        whole.executescript(creation_script())
        expected = dict(whole.execute(query))
    finally:
        whole.close()
    found = dict(connection.execute(query))
    has_chain = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'chain'").fetchone()[0]
    return sorted(
        name
        for name, sql in expected.items()
        if found.get(name) != sql and (has_chain or not name.startswith("chain_"))
    )


def chain_head(connection: sqlite3.Connection) -> str:
    """Return the last link."""
    row = connection.execute("SELECT digest FROM chain ORDER BY position DESC LIMIT 1").fetchone()
    return GENESIS if row is None else str(row[0])


def upgrade(connection: sqlite3.Connection) -> None:
    """Give a ledger of format 1 its chain; the first link covers all that it holds."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in upgrade_statements():
            connection.execute(statement)
        merged: dict[str, list[tuple[Any, ...]]] = {}
        for _, tables in sorted(read_chained(connection).items()):
            for table, rows in tables.items():
                merged.setdefault(table, []).extend(rows)
        position = connection.execute("SELECT value FROM meta WHERE name = 'position'").fetchone()[0]
        if position:
            connection.execute("INSERT INTO chain VALUES (?, ?)", (position, link_digest(GENESIS, merged)))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def check_header(connection: sqlite3.Connection, path: Path) -> int:
    """Return the format of the file. CheckpointError if it is not a ledger, or of a later rayrl."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise CheckpointError(f"{path} is an SQLite file, but not a ledger of rayrl")
    if version > SCHEMA_VERSION:
        raise CheckpointError(f"ledger {path} has format {version}, this rayrl reads {SCHEMA_VERSION}; upgrade rayrl")
    return version


@contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Turn what SQLite raises into CheckpointError."""
    try:
        yield
    except sqlite3.Error as error:
        raise CheckpointError(f"ledger {path} cannot be used: {error}") from error
