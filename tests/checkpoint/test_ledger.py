"""The ledger: exactly once, append-only, whole transactions."""

import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rayrl.checkpoint.ledger import Ledger, Outcome, PromptOutcome, PublishedVersion
from rayrl.errors import CheckpointError
from rayrl.types.prompt import PromptId

STEPS_UNTIL_KILLED = """
import sys
from itertools import count
from rayrl.checkpoint.ledger import Ledger, PromptOutcome
from rayrl.types.prompt import PromptId
ledger = Ledger.open(sys.argv[1])
for step in count(1):
    ids = [PromptId(dataset="sums", epoch=0, ordinal=step * 8 + i) for i in range(8)]
    ledger.record_step(step, step, [PromptOutcome(prompt_id=i, outcome="trained") for i in ids])
    print(step, flush=True)
"""

KILLED_INSIDE_A_STEP = """
import os, signal, sys
from rayrl.checkpoint.ledger import Ledger, PromptOutcome
from rayrl.types.prompt import PromptId
def outcomes(step, killed):
    for i in range(8):
        if killed and i == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield PromptOutcome(prompt_id=PromptId(dataset="sums", epoch=0, ordinal=step * 8 + i), outcome="trained")
ledger = Ledger.open(sys.argv[1])
ledger.record_step(1, 1, outcomes(1, False))
ledger.record_step(2, 2, outcomes(2, True))
"""


def outcome(ordinal: int, kind: Outcome = "trained", epoch: int = 0, reason: str = "") -> PromptOutcome:
    return PromptOutcome(
        prompt_id=PromptId(dataset="sums", epoch=epoch, ordinal=ordinal),
        outcome=kind,
        reason=reason,
        attempts=2,
        oldest_version=3,
        newest_version=4,
    )


def published(version: int, digest: str, engines: Sequence[str], missing: Sequence[str] = ()) -> PublishedVersion:
    return PublishedVersion(
        version=version, sent=digest, acknowledged=dict.fromkeys(engines, digest), missing=tuple(missing)
    )


def open_ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path / "ledger.sqlite", clock=lambda: 5.0)


def rows(tmp_path: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_outcomes_come_back_with_step_and_version(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    kinds = [outcome(2), outcome(1, "filtered", reason="all rewards equal"), outcome(0, "given_up", epoch=1)]

    ledger.record_step(7, 9, kinds)

    assert [(item.outcome, item.step, item.version) for item in ledger.outcomes()] == [
        (kinds[1], 7, 9),
        (kinds[0], 7, 9),
        (kinds[2], 7, 9),
    ]
    assert [item.outcome for item in ledger.outcomes(epoch=1)] == [kinds[2]]
    assert ledger.counts() == {"trained": 1, "filtered": 1, "given_up": 1, "superseded": 0}
    assert ledger.counts(epoch=1) == {"trained": 0, "filtered": 0, "given_up": 1, "superseded": 0}
    assert ledger.last_step == 7


def test_second_outcome_of_a_prompt_is_refused_and_its_whole_step_with_it(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record_step(1, 1, [outcome(0)])

    with pytest.raises(CheckpointError, match="prompt sums/0/0 was trained in step 1 and is now filtered in step 2"):
        ledger.record_step(2, 2, [outcome(1), outcome(0, "filtered")])

    assert [item.outcome.prompt_id.ordinal for item in ledger.outcomes()] == [0]
    assert (ledger.last_step, ledger.position) == (1, 1)
    ledger.record_step(2, 2, [outcome(1)])
    assert ledger.last_step == 2


def test_prompt_twice_in_one_step_is_refused(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)

    with pytest.raises(CheckpointError, match="exactly one outcome"):
        ledger.record_step(1, 1, [outcome(0), outcome(0)])


def test_exactly_once_is_held_by_the_file_itself(tmp_path: Path) -> None:
    open_ledger(tmp_path).record_step(1, 1, [outcome(0)])

    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        rows(tmp_path, "INSERT INTO prompts VALUES (NULL,'sums',0,0,'trained','',1,2,1,0,0,9,0,NULL)")


def test_same_prompt_of_another_epoch_is_another_prompt(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)

    ledger.record_step(1, 1, [outcome(0), outcome(0, epoch=1)])

    assert ledger.counts()["trained"] == 2


def test_step_recorded_twice_is_refused(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record_step(1, 1, [])

    with pytest.raises(CheckpointError, match=r"table steps.*UNIQUE"):
        ledger.record_step(1, 1, [])


def test_unknown_outcome_is_refused(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)

    with pytest.raises(CheckpointError, match="CHECK"):
        ledger.record_step(1, 1, [outcome(0, "lost")])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM prompts",
        "UPDATE prompts SET step = 2",
        "UPDATE steps SET version = 2",
        "UPDATE publications SET digest = 'x'",
        "DELETE FROM events",
        "UPDATE prompts SET superseded_by = NULL WHERE superseded_by IS NOT NULL",
    ],
)
def test_rows_cannot_be_changed_or_removed(tmp_path: Path, sql: str) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record_step(1, 1, [outcome(0)])
    ledger.record_publication(published(1, "d", ["e0"]))
    ledger.record_event("engine_died", 1, {})
    ledger.rewind_to(0, min_position=0)

    with pytest.raises(sqlite3.IntegrityError, match=r"append-only|superseded already"):
        rows(tmp_path, sql)


def test_rewind_supersedes_later_steps_keeps_their_rows_and_lets_the_prompts_be_trained_again(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    for step in (1, 2, 3):
        ledger.record_step(step, step, [outcome(step)])
        ledger.record_publication(published(step, f"d{step}", ["e0"]))

    superseded = ledger.rewind_to(1, min_position=2)
    ledger.record_step(2, 2, [outcome(3), outcome(2, "given_up", reason="error")])

    assert superseded == 8
    assert [(item.outcome.prompt_id.ordinal, item.outcome.outcome, item.step) for item in ledger.outcomes()] == [
        (1, "trained", 1),
        (2, "given_up", 2),
        (3, "trained", 2),
    ]
    assert ledger.counts()["superseded"] == 2
    assert rows(tmp_path, "SELECT step, generation, superseded_by FROM prompts ORDER BY id") == [
        (1, 0, None),
        (2, 0, 1),
        (3, 0, 1),
        (2, 1, None),
        (2, 1, None),
    ]
    sql = "SELECT version, superseded_by FROM publications WHERE engine = 'e0' ORDER BY id"
    assert rows(tmp_path, sql) == [(1, None), (2, 1), (3, 1)]
    assert rows(tmp_path, "SELECT generation, to_step, position, superseded FROM rewinds") == [(1, 1, 2, 8)]


def test_prompt_given_up_after_the_checkpoint_of_its_step_is_superseded_and_one_before_it_is_not(
    tmp_path: Path,
) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record_step(1, 1, [outcome(0)])
    ledger.record_outcomes(1, 1, [outcome(1, "given_up")])
    position = ledger.position
    ledger.record_outcomes(1, 1, [outcome(2, "given_up")])

    ledger.rewind_to(1, min_position=position)
    ledger.record_step(2, 2, [outcome(2)])

    kinds = {item.outcome.prompt_id.ordinal: item.outcome.outcome for item in ledger.outcomes()}
    assert kinds == {0: "trained", 1: "given_up", 2: "trained"}


def test_rewinds_can_follow_each_other(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    for _ in range(3):
        ledger.record_step(1, 1, [outcome(0)])
        ledger.rewind_to(0, min_position=0)

    assert ledger.counts() == {"trained": 0, "filtered": 0, "given_up": 0, "superseded": 3}
    assert ledger.last_step == 0
    assert rows(tmp_path, "SELECT superseded_by FROM prompts ORDER BY id") == [(1,), (2,), (3,)]


def test_position_counts_transactions_over_rewinds_and_reopening(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record_step(1, 1, [outcome(0), outcome(1)])
    ledger.record_event("engine_died", 1, {"engine": "e0"})
    ledger.rewind_to(0, min_position=0)
    ledger.close()

    assert open_ledger(tmp_path).position == 3


def test_ledger_behind_its_checkpoint_is_refused_and_unchanged(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record_step(1, 1, [outcome(0)])

    with pytest.raises(CheckpointError, match="is at position 1, the checkpoint of step 5 at 5"):
        ledger.rewind_to(5, min_position=5)

    assert rows(tmp_path, "SELECT * FROM rewinds") == []


def test_publication_has_a_row_for_what_was_sent_and_one_per_engine(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record_step(4, 4, [])

    ledger.record_publication(published(4, "abc", ["e0", "e1"], missing=["e2"]))
    ledger.record_publication(published(4, "abc", ["e2"]), step=9)

    assert rows(tmp_path, "SELECT version, step, engine, digest, acknowledged FROM publications ORDER BY id") == [
        (4, 4, "trainer", "abc", 1),
        (4, 4, "e0", "abc", 1),
        (4, 4, "e1", "abc", 1),
        (4, 4, "e2", "abc", 0),
        (4, 9, "trainer", "abc", 1),
        (4, 9, "e2", "abc", 1),
    ]


def test_event_keeps_its_detail_and_survives_a_rewind(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record_event("engine_died", 3, {"engine": "e0", "code": -9})

    ledger.rewind_to(0, min_position=0)

    expected = ("engine_died", 3, '{"engine": "e0", "code": -9}', 5.0)
    assert rows(tmp_path, "SELECT kind, step, detail, time FROM events WHERE kind != 'rewind'") == [expected]


def test_threads_may_share_a_ledger(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)

    def write(first: int) -> None:
        for step in range(first, first + 10):
            ledger.record_step(step, step, [outcome(step)])

    threads = [threading.Thread(target=write, args=(first,)) for first in (100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (ledger.counts()["trained"], ledger.position) == (20, 20)


def test_ledger_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    writer = open_ledger(tmp_path)
    reader = Ledger.open(tmp_path / "ledger.sqlite", read_only=True)

    writer.record_step(1, 1, [outcome(0)])

    assert reader.counts()["trained"] == 1
    with pytest.raises(CheckpointError, match="readonly"):
        reader.record_step(2, 2, [])


def test_reading_a_ledger_that_is_not_there_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no ledger at"):
        Ledger.open(tmp_path / "ledger.sqlite", read_only=True)

    assert list(tmp_path.iterdir()) == []


def test_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("not a database, and long enough to look at" * 10)
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE t (a)")

    with pytest.raises(CheckpointError, match="not a database"):
        Ledger.open(tmp_path / "text.sqlite")
    with pytest.raises(CheckpointError, match="not a ledger of rayrl"):
        Ledger.open(tmp_path / "other.sqlite")


def test_ledger_of_a_later_format_is_refused(tmp_path: Path) -> None:
    open_ledger(tmp_path).close()
    rows(tmp_path, "PRAGMA user_version = 9")

    with pytest.raises(CheckpointError, match="has format 9, this rayrl reads 2; upgrade"):
        open_ledger(tmp_path)


def test_use_after_close_is_a_checkpoint_error(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.close()
    ledger.close()

    with pytest.raises(CheckpointError, match="closed database"):
        _ = ledger.position


def test_process_killed_between_any_two_statements_leaves_whole_steps(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", STEPS_UNTIL_KILLED, str(tmp_path / "ledger.sqlite")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(20)][-1]
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=30)

    ledger = open_ledger(tmp_path)
    counts = rows(tmp_path, "SELECT step, count(*) FROM prompts GROUP BY step ORDER BY step")

    assert ledger.last_step >= acknowledged, "what was reported as recorded is there"
    assert counts == [(step, 8) for step in range(1, ledger.last_step + 1)]
    assert ledger.position == ledger.last_step


def test_process_killed_inside_a_transaction_leaves_nothing_of_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_INSIDE_A_STEP, str(tmp_path / "ledger.sqlite")], timeout=60, check=False
    )

    ledger = open_ledger(tmp_path)

    assert done.returncode == -signal.SIGKILL
    assert (ledger.last_step, ledger.counts()["trained"]) == (1, 8)
    ledger.record_step(2, 2, [outcome(16)])
    assert ledger.last_step == 2
