"""The audit: a real run passes, and each kind of tampering or violation is named."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrl.audit.report import AuditReport, audit_run, report_lines
from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_chain import GENESIS, link_digest
from rayrl.checkpoint.ledger_events import ROLLOUT_LOG_LOST
from rayrl.checkpoint.ledger_reader import read_ledger
from rayrl.cli.main import main

pytestmark = [pytest.mark.ray]
Tamper = Callable[..., None]


def refuted(report: AuditReport) -> dict[str, str]:
    """Return the violations of each refuted check, joined."""
    return {item.check: "\n".join(item.violations) for item in report.findings if item.verdict == "refuted"}


def forge_chain(run_dir: Path) -> None:
    """Compute all links anew, as somebody would who knows how they are made."""
    ledger = read_ledger(run_dir / "ledger.sqlite")
    connection = sqlite3.connect(run_dir / "ledger.sqlite")
    previous = GENESIS
    for position, _ in ledger.links:
        previous = link_digest(previous, ledger.chained.get(position, {}))
        connection.execute("UPDATE chain SET digest = ? WHERE position = ?", (previous, position))
    connection.commit()
    connection.close()


def rewrite(run_dir: Path, step: int, change: Callable[[dict[str, list]], None]) -> None:
    """Change the columns of one file of the rollout log."""
    path = run_dir / "rollouts" / f"step_{step:06d}.parquet"
    table = pq.read_table(path)
    columns = table.to_pydict()
    change(columns)
    pq.write_table(pa.Table.from_pydict(columns, schema=table.schema), path)


def test_run_that_was_resumed_passes_and_leaves_its_numbers(finished_run: Path) -> None:
    report = audit_run(finished_run)
    left = json.loads((finished_run / "audit.json").read_text())

    assert report.passed, report_lines(report)
    assert [item.check for item in report.findings] == [
        "integrity",
        "steps",
        "prompts",
        "outcomes",
        "ages",
        "denominators",
        "publications",
    ]
    assert left["passed"] is True
    assert left["numbers"] == json.loads(json.dumps(report.numbers))
    numbers = report.numbers
    assert (numbers["steps"], numbers["outcomes"]["trained"]) == (5, 15)
    assert sum(numbers["trajectory_ages"].values()) == 30
    assert set(numbers["trajectory_ages"]) <= {"0", "1"}
    assert {tuple(item["acknowledged"]) for item in numbers["publications"]} == {("inference-0", "inference-1")}
    assert {len(item["digests"]) for item in numbers["publications"]} == {1}, "what was sent, and what arrived"
    assert numbers["rewinds"] == 1, "the resume, and not the start"
    assert "(1 finished)" in report.findings[2].claim


def test_command_exits_with_zero_for_a_good_run_and_one_for_a_bad_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as good:
        main(["audit", str(run_dir)])
    (run_dir / "rollouts" / "step_000002.parquet").unlink()
    with pytest.raises(SystemExit) as bad:
        main(["audit", str(run_dir)])

    assert (good.value.code, bad.value.code) == (0, 1)
    out = capsys.readouterr().out
    assert "audit of" in out and "NOT PASSED" in out
    assert "step 2: rollouts/step_000002.parquet is missing" in out


def test_folder_that_is_no_run_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["audit", str(tmp_path)])

    assert end.value.code == 2
    assert "run.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "check", "words"),
    [
        ("UPDATE prompts SET version = 9 WHERE id = 4", "integrity", "does not match its link of the hash chain"),
        ("DELETE FROM prompts WHERE id = 5", "integrity", "does not match its link of the hash chain"),
        (
            "INSERT INTO events VALUES (NULL, 'engine_died', 1, '{}', 0.0, 3, 0)",
            "integrity",
            "transaction 3 does not match its link",
        ),
        ("DELETE FROM chain WHERE position = 4", "integrity", "no link before transaction 5"),
        ("UPDATE prompts SET superseded_by = 1 WHERE id = 2", "integrity", "is marked superseded by 1, from the"),
        ("DELETE FROM rewinds", "integrity", "are not those that were recorded"),
        ("UPDATE meta SET value = value + 3 WHERE name = 'position'", "integrity", "the end was cut off"),
    ],
)
def test_edited_ledger_is_named(run_dir: Path, tamper: Tamper, statement: str, check: str, words: str) -> None:
    tamper(statement)

    assert words in refuted(audit_run(run_dir))[check]


@pytest.mark.parametrize(
    ("statements", "check", "words"),
    [
        (["UPDATE steps SET step = 9 WHERE step = 4"], "steps", "step 5 follows step 3"),
        (["UPDATE steps SET version = 7 WHERE step = 4"], "steps", "left version 7; it started from version 3"),
        (
            [
                "INSERT INTO prompts SELECT NULL, dataset, epoch, ordinal, outcome, reason, version, step, attempts, "
                "oldest_version, newest_version, position, generation, NULL FROM prompts WHERE id = 1"
            ],
            "prompts",
            "has 2 outcomes",
        ),
        (["DELETE FROM prompts WHERE id = 1"], "prompts", "count as done and have no outcome, the first is"),
        (
            ["UPDATE prompts SET outcome = 'given_up', reason = '' WHERE id = 1"],
            "outcomes",
            "was given_up in step 1 without a reason",
        ),
        (
            ["UPDATE publications SET digest = 'other' WHERE version = 3 AND engine = 'inference-1'"],
            "publications",
            "version 3 arrived with 2 digests: sent ",
        ),
        (
            ["DELETE FROM publications WHERE version = 2 AND engine = 'inference-1'"],
            "publications",
            "version 2 was not acknowledged by inference-1, and no event says that this engine left",
        ),
        (
            ["UPDATE publications SET acknowledged = 0 WHERE version = 2 AND engine = 'inference-0'"],
            "publications",
            "version 2 was not acknowledged by inference-0",
        ),
        (["DELETE FROM publications WHERE version = 4"], "publications", "version 4 was never published"),
        (
            [
                "UPDATE steps SET detail = json_set(detail, '$.loss_tokens', "
                "json_extract(detail, '$.loss_tokens') + 1) WHERE step = 2"
            ],
            "denominators",
            "step 2: loss tokens are",
        ),
    ],
)
def test_violation_is_named_even_if_the_chain_was_forged(
    run_dir: Path, tamper: Tamper, statements: list[str], check: str, words: str
) -> None:
    tamper(*statements)
    forge_chain(run_dir)

    found = refuted(audit_run(run_dir))

    assert words in found[check]


def test_forged_chain_is_refuted_by_the_link_that_a_checkpoint_knows(run_dir: Path, tamper: Tamper) -> None:
    tamper("UPDATE prompts SET attempts = 9 WHERE id = 1")
    forge_chain(run_dir)

    assert "knows another link at ledger position" in refuted(audit_run(run_dir))["integrity"]


def test_ledger_cut_back_to_an_older_one_is_refuted_by_rollouts_and_checkpoints(run_dir: Path, tamper: Tamper) -> None:
    tables = ("prompts", "steps", "publications", "events", "chain")
    tamper(
        *(f"DELETE FROM {table} WHERE position > 3" for table in tables),
        "DELETE FROM rewinds",
        "UPDATE meta SET value = 3 WHERE name = 'position'",
        "UPDATE meta SET value = 0 WHERE name = 'generation'",
    )

    found = refuted(audit_run(run_dir))["integrity"]

    assert "step_000005.parquet is there, but the ledger knows no step 5" in found
    assert "the ledger ends at 3: its end was cut off" in found


def test_truncated_ledger_is_refuted_and_not_an_error(run_dir: Path) -> None:
    path = run_dir / "ledger.sqlite"
    path.write_bytes(path.read_bytes()[:6000])

    report = audit_run(run_dir)

    assert not report.passed
    assert "ledger" in refuted(report)["integrity"]


def test_missing_ledger_is_refuted(run_dir: Path) -> None:
    (run_dir / "ledger.sqlite").unlink()

    assert "there is no ledger" in refuted(audit_run(run_dir))["integrity"]


def test_damaged_rollout_file_is_named(run_dir: Path) -> None:
    path = run_dir / "rollouts" / "step_000003.parquet"
    path.write_bytes(path.read_bytes()[:200])

    found = refuted(audit_run(run_dir))
    assert "rollouts/step_000003.parquet cannot be used: truncated or damaged (200 bytes)" in found["integrity"]
    assert "step 3: rollouts/step_000003.parquet cannot be used" in found["denominators"]
    assert "missing" not in "".join(found.values())


def test_ledger_without_its_triggers_is_refuted_although_no_row_was_changed(run_dir: Path, tamper: Tamper) -> None:
    tamper()

    found = refuted(audit_run(run_dir))

    assert list(found) == ["integrity"]
    assert "made append-only by triggers and unique indexes" in found["integrity"]
    assert "live_prompts" in found["integrity"] and "steps_keeps_rows" in found["integrity"]


def test_edited_rollouts_are_not_what_was_trained_on(run_dir: Path) -> None:
    def flip(columns: dict[str, list]) -> None:
        columns["reward"][0] = 0.5

    rewrite(run_dir, 2, flip)

    assert "step_000002.parquet is not what was trained on" in refuted(audit_run(run_dir))["denominators"]


def test_stale_token_that_carried_loss_is_named(run_dir: Path) -> None:
    def age(columns: dict[str, list]) -> None:
        columns["versions"][0] = [0 if version >= 0 else -1 for version in columns["versions"][0]]

    rewrite(run_dir, 5, age)

    found = refuted(audit_run(run_dir))
    assert "step 5:" in found["ages"] and "are older than 3" in found["ages"] and "carried loss" in found["ages"]


def test_token_of_a_version_that_was_not_there_yet_is_named(run_dir: Path) -> None:
    def youth(columns: dict[str, list]) -> None:
        columns["versions"][0] = [4 if version >= 0 else -1 for version in columns["versions"][0]]

    rewrite(run_dir, 2, youth)

    assert "sampled by versions after 1" in refuted(audit_run(run_dir))["ages"]


def test_run_without_rollout_log_is_unproven_and_says_what_is_missing(run_dir: Path) -> None:
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("rollout_log: true", "rollout_log: false"))
    for path in (run_dir / "rollouts").glob("*"):
        path.unlink()

    report = audit_run(run_dir)

    assert not report.passed
    assert {item.check: item.verdict for item in report.findings if item.verdict != "proven"} == {
        "ages": "unproven",
        "denominators": "unproven",
    }


@pytest.mark.parametrize("told", [True, False])
def test_rollout_file_is_missed_unless_the_ledger_says_that_it_could_not_be_written(run_dir: Path, told: bool) -> None:
    ledger = Ledger.open(run_dir / "ledger.sqlite")
    if told:
        ledger.record_event(ROLLOUT_LOG_LOST, 4, {"error": "No space left on device"})
    ledger.close()
    (run_dir / "rollouts" / "step_000004.parquet").unlink()

    verdicts = {item.check: item for item in audit_run(run_dir).findings}

    assert verdicts["denominators"].verdict == ("unproven" if told else "refuted")
    assert ("No space left on device" in verdicts["denominators"].missing) == told


def test_ledger_of_format_one_stays_readable_and_gets_its_chain_when_it_is_written(run_dir: Path) -> None:
    connection = sqlite3.connect(run_dir / "ledger.sqlite")
    connection.execute("DROP TABLE chain")
    connection.execute("PRAGMA user_version = 1")
    connection.close()

    before = audit_run(run_dir)
    ledger = Ledger.open(run_dir / "ledger.sqlite")
    ledger.record_event("note", 5, {})
    ledger.close()
    after = read_ledger(run_dir / "ledger.sqlite")

    assert before.findings[0].verdict == "unproven"
    assert after.format == 2 and len(after.links) == 2
