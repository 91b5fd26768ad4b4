"""The hash chain: one link for each transaction, broken by any change of what was written."""

from pathlib import Path

import pytest

from rayrl.checkpoint.ledger import Ledger, PromptOutcome, PublishedVersion
from rayrl.checkpoint.ledger_chain import GENESIS, Rows, first_broken_link, link_digest
from rayrl.checkpoint.ledger_reader import read_ledger
from rayrl.errors import CheckpointError
from rayrl.types.prompt import PromptId

ROWS: dict[int, Rows] = {1: {"steps": [(1, "a")]}, 2: {"events": [("x", 2)], "steps": [(2, "b")]}, 3: {"events": []}}


def links(rows: dict[int, Rows]) -> list[tuple[int, str]]:
    found, previous = [], GENESIS
    for position in sorted(rows):
        previous = link_digest(previous, rows[position])
        found.append((position, previous))
    return found


def test_chain_of_unchanged_rows_is_whole() -> None:
    assert first_broken_link(links(ROWS), ROWS) is None


@pytest.mark.parametrize(
    ("rows", "position"),
    [
        ({**ROWS, 2: {"events": [("x", 2)], "steps": [(2, "c")]}}, 2),
        ({**ROWS, 2: {"events": [("x", 2)]}}, 2),
        ({**ROWS, 1: {"steps": [(1, "a"), (1, "a")]}}, 1),
        ({1: ROWS[1], 3: ROWS[3]}, 2),
        ({**ROWS, 4: {"events": [("late", 4)]}}, 4),
    ],
    ids=["edited", "removed", "slipped in", "transaction removed", "behind the end"],
)
def test_first_change_is_found(rows: dict[int, Rows], position: int) -> None:
    assert first_broken_link(links(ROWS), rows) == position


def test_removed_link_breaks_the_chain_at_the_next_one() -> None:
    chain = links(ROWS)
    assert first_broken_link([chain[0], chain[2]], ROWS) == 3


def test_each_transaction_moves_the_head_and_reopening_does_not(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(path)
    heads = [ledger.head]
    outcome = PromptOutcome(prompt_id=PromptId(dataset="sums", epoch=0, ordinal=0), outcome="trained")
    ledger.record_step(1, 1, [outcome], {"loss_tokens": 7})
    heads.append(ledger.head)
    ledger.record_publication(PublishedVersion(version=1, sent="d", acknowledged={"e0": "d", "e1": "d"}))
    heads.append(ledger.head)
    ledger.rewind_to(0, min_position=0)
    heads.append(ledger.head)
    ledger.close()

    record = read_ledger(path)
    assert len(set(heads)) == 4
    assert [digest for _, digest in record.links] == heads[1:]
    assert Ledger.open(path).head == heads[-1]
    assert first_broken_link(record.links, record.chained) is None


def test_transaction_that_fails_adds_no_link(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.record_step(1, 1, [])
    head = ledger.head

    with pytest.raises(CheckpointError):
        ledger.record_step(1, 1, [])

    assert ledger.head == head
