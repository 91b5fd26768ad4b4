"""Tables of the ledger.

Rows are never changed or removed, except that a rewind sets `superseded_by` once: triggers hold this. A row is live
while `superseded_by` is null. Each row carries the position (number of its transaction, from 1) and the generation that
it was written in: 0, and one more after each rewind. A rewind is a row, and an event, of its own. `chain` has one link
for each transaction (`ledger_chain`), since triggers do not hold against somebody with another program.
"""

APPLICATION_ID = 0x7261_726C
"""Marks the file as a ledger of rayrl, in SQLite's header."""

SCHEMA_VERSION = 2
"""1 had no chain; such a ledger gets one when it is opened for writing."""

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE prompts (
    id INTEGER PRIMARY KEY,
    dataset TEXT NOT NULL, epoch INTEGER NOT NULL, ordinal INTEGER NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('trained', 'filtered', 'given_up')),
    reason TEXT NOT NULL,
    version INTEGER NOT NULL, step INTEGER NOT NULL, attempts INTEGER NOT NULL,
    oldest_version INTEGER, newest_version INTEGER,
    position INTEGER NOT NULL, generation INTEGER NOT NULL, superseded_by INTEGER
);
CREATE UNIQUE INDEX live_prompts ON prompts (dataset, epoch, ordinal) WHERE superseded_by IS NULL;
CREATE INDEX prompts_by_position ON prompts (position);

CREATE TABLE steps (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL, version INTEGER NOT NULL, detail TEXT NOT NULL, time REAL NOT NULL,
    position INTEGER NOT NULL, generation INTEGER NOT NULL, superseded_by INTEGER
);
CREATE UNIQUE INDEX live_steps ON steps (step) WHERE superseded_by IS NULL;

CREATE TABLE publications (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL, step INTEGER NOT NULL, engine TEXT NOT NULL, digest TEXT NOT NULL,
    acknowledged INTEGER NOT NULL CHECK (acknowledged IN (0, 1)), time REAL NOT NULL,
    position INTEGER NOT NULL, generation INTEGER NOT NULL, superseded_by INTEGER
);

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL, step INTEGER NOT NULL, detail TEXT NOT NULL, time REAL NOT NULL,
    position INTEGER NOT NULL, generation INTEGER NOT NULL
);

CREATE TABLE rewinds (
    generation INTEGER PRIMARY KEY,
    to_step INTEGER NOT NULL, position INTEGER NOT NULL, superseded INTEGER NOT NULL, time REAL NOT NULL
);

INSERT INTO meta VALUES ('position', 0), ('generation', 0);
"""

_CHAIN = "CREATE TABLE chain (position INTEGER PRIMARY KEY, digest TEXT NOT NULL);"

REWINDABLE = ("prompts", "steps", "publications")
"""Tables whose rows a rewind supersedes. Events stay: a failure has happened, whatever came of the step."""

COLUMNS = {
    "prompts": "dataset epoch ordinal outcome reason version step attempts oldest_version newest_version "
    "position generation",
    "steps": "step version detail time position generation",
    "publications": "version step engine digest acknowledged time position generation",
    "events": "kind step detail time position generation",
    "rewinds": "generation to_step position superseded time",
    "chain": "position digest",
}
"""Columns of each table in order, without `id` and `superseded_by`."""


def creation_script() -> str:
    """Return the SQL that makes an empty ledger, in one transaction."""
    supersedes = [
        f"CREATE TRIGGER {table}_supersedes_once BEFORE UPDATE OF superseded_by ON {table} "
        f"WHEN OLD.superseded_by IS NOT NULL BEGIN SELECT RAISE(ABORT, 'the row is superseded already'); END;"
        for table in REWINDABLE
    ]
    keeps = [_append_only(table) for table in COLUMNS]
    return "\n".join(["BEGIN IMMEDIATE;", _TABLES, _CHAIN, *keeps, *supersedes, _header(), "COMMIT;"])


def upgrade_statements() -> list[str]:
    """Return the statements that give a ledger of format 1 its chain; the caller adds the first link."""
    return [_CHAIN, *_append_only("chain").splitlines(), f"PRAGMA user_version = {SCHEMA_VERSION};"]


def _append_only(table: str) -> str:
    columns = ", ".join(COLUMNS[table].split())
    return (
        f"CREATE TRIGGER {table}_keeps_rows BEFORE DELETE ON {table} "
        f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
        f"CREATE TRIGGER {table}_keeps_values BEFORE UPDATE OF {columns} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;"
    )


def _header() -> str:
    return f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {SCHEMA_VERSION};"
