"""Whether a ledger is the one that a checkpoint was made with; looked at before anything is started for a resume."""

import sqlite3
from pathlib import Path

from rayrl.checkpoint.ledger_file import as_checkpoint_error, check_header
from rayrl.checkpoint.store import Checkpoint
from rayrl.errors import CheckpointError


def check_ledger(path: Path, checkpoint: Checkpoint | None) -> int:
    """Return the last step that counts in the ledger of a run that is to go on; 0 if there is none. Writes nothing.

    `checkpoint` is what the run goes on from, None to begin at step 0. Raises CheckpointError if the ledger is
    damaged, or is missing, older than the checkpoint or of another course; the message says what can be done.
    """
    state = None if checkpoint is None else checkpoint.load_state()
    needed = 0 if state is None else state.ledger_position
    if not path.is_file():
        if state is not None and needed > 0:
            raise _refusal(path, f"ledger {path} is missing, the checkpoint of step {state.step} needs it")
        return 0
    try:
        with as_checkpoint_error(path):
            connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            try:
                is_empty = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                fault = None if is_empty else connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                facts = (0, 0, None) if is_empty or fault != "ok" else _facts(connection, path, needed)
            finally:
                connection.close()
    except CheckpointError as error:
        if isinstance(error.__cause__, sqlite3.Error):
            raise _refusal(path, str(error)) from error
        raise
    if fault not in (None, "ok"):
        raise _refusal(path, f"ledger {path} is damaged: {' '.join(str(fault).split())}")
    position, last_step, link = facts
    if state is None:
        return last_step
    if position < needed:
        what = "is empty" if is_empty else f"is at position {position}"
        raise _refusal(
            path,
            f"ledger {path} {what}, the checkpoint of step {state.step} at position {needed}: it is an older copy or "
            "of another run",
        )
    head = state.extra.get("ledger_head")
    if link is not None and head is not None and link != head:
        raise _refusal(
            path,
            f"ledger {path} has another history up to position {needed} than the checkpoint of step {state.step}: it "
            "is of another run, or was written anew",
        )
    return last_step


def _facts(connection: sqlite3.Connection, path: Path, needed: int) -> tuple[int, int, str | None]:
    """Return the position, the last live step, and the link at `needed`: None if the ledger's format has no links."""
    version = check_header(connection, path)
    position = connection.execute("SELECT value FROM meta WHERE name = 'position'").fetchone()[0]
    last = connection.execute("SELECT max(step) FROM steps WHERE superseded_by IS NULL").fetchone()[0]
    link: str | None = None
    if version > 1 and needed > 0:
        row = connection.execute("SELECT digest FROM chain WHERE position = ?", (needed,)).fetchone()
        link = "" if row is None else str(row[0])
    return int(position), int(last or 0), link


def _refusal(path: Path, what: str) -> CheckpointError:
    export = path.parent / "export"
    weights = f", with model.path={export}" if (export / "config.json").is_file() else ""
    return CheckpointError(
        f"{what}; put {path.name} back from a copy that is no older than the checkpoint, or start a new run under "
        f"another run.name{weights}"
    )
