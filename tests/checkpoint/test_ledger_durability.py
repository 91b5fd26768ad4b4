"""What a power cut leaves of a ledger: a whole beginning, which reaches at least as far as the last `sync`."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from rayrl.checkpoint.ledger import Ledger, PromptOutcome, PublishedVersion
from rayrl.checkpoint.ledger_chain import first_broken_link
from rayrl.checkpoint.ledger_file import missing_guards
from rayrl.checkpoint.ledger_reader import read_ledger
from rayrl.types.prompt import PromptId

NAME = "ledger.sqlite"


def write_step(ledger: Ledger, step: int) -> None:
    ids = [PromptId(dataset="sums", epoch=0, ordinal=4 * step + index) for index in range(4)]
    ledger.record_step(
        step,
        step,
        [PromptOutcome(prompt_id=item, outcome="trained") for item in ids],
        {"loss_tokens": 9},
        PublishedVersion(version=step, sent=f"d{step}", acknowledged={"e0": f"d{step}"}),
    )


def cut_journal(source: Path, target: Path, size: int) -> None:
    """Copy a ledger with only the first `size` bytes of its journal: what the disk had of it."""
    target.mkdir()
    shutil.copyfile(source / NAME, target / NAME)
    (target / f"{NAME}-wal").write_bytes((source / f"{NAME}-wal").read_bytes()[:size])


def test_power_cut_anywhere_in_the_journal_leaves_whole_steps_and_an_unbroken_chain(tmp_path: Path) -> None:
    source = tmp_path / "run"
    source.mkdir()
    ledger = Ledger.open(source / NAME)
    write_step(ledger, 1)
    ledger.sync()
    on_disk = (source / f"{NAME}-wal").stat().st_size
    for step in range(2, 6):
        write_step(ledger, step)
    journal = (source / f"{NAME}-wal").stat().st_size

    positions = []
    for number, size in enumerate(range(on_disk, journal + 1, 4000)):
        cut_journal(source, tmp_path / str(number), size)
        record = read_ledger(tmp_path / str(number) / NAME)
        positions.append(record.position)
        assert first_broken_link(record.links, record.chained) is None
        assert [row.step for row in record.live_steps] == list(range(1, record.position + 1))
        assert len(record.prompts) == 4 * record.position == 2 * len(record.publications)

    assert positions == sorted(positions)
    assert positions[0] == 1 and set(positions) >= {1, 2, 3, 4}
    ledger.close()


def test_sync_waits_for_the_disk_once_and_later_steps_do_not(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / NAME)
    write_step(ledger, 1)

    ledger.sync()
    write_step(ledger, 2)

    connection = sqlite3.connect(tmp_path / NAME)
    assert dict(connection.execute("SELECT name, value FROM meta"))["synced"] == 1
    connection.close()
    assert ledger._connection.execute("PRAGMA synchronous").fetchone() == (1,), "NORMAL"
    assert ledger.position == 2


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("DROP TRIGGER steps_keeps_rows", ["steps_keeps_rows"]),
        ("DROP INDEX live_prompts", ["live_prompts"]),
        ("DROP TRIGGER chain_keeps_values", ["chain_keeps_values"]),
    ],
)
def test_guard_that_was_dropped_is_named(tmp_path: Path, statement: str, names: list[str]) -> None:
    Ledger.open(tmp_path / NAME).close()
    connection = sqlite3.connect(tmp_path / NAME)
    assert missing_guards(connection) == []

    connection.execute(statement)

    assert missing_guards(connection) == names
    connection.close()


def test_guard_that_was_replaced_by_a_harmless_one_of_the_same_name_is_named(tmp_path: Path) -> None:
    Ledger.open(tmp_path / NAME).close()
    connection = sqlite3.connect(tmp_path / NAME)
    connection.execute("DROP TRIGGER steps_keeps_rows")
    connection.execute("CREATE TRIGGER steps_keeps_rows BEFORE DELETE ON steps BEGIN SELECT 1; END")

    assert missing_guards(connection) == ["steps_keeps_rows"]
    connection.close()
