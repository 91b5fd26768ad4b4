"""The doctor: nothing for a good run; hangs, wrong results and memory with evidence and a setting."""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rayrl.audit.doctor import diagnose, diagnosis_lines
from rayrl.audit.doctor_record import examine, find_run
from rayrl.audit.live_status import LiveStatus, write_status
from rayrl.audit.symptom import Symptom
from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import RUN_FAILED
from rayrl.cli.main import main
from rayrl.errors import RunFolderError
from rayrl.infra.collective_record import CollectiveRecord
from rayrl.infra.collective_ring import CollectiveRing
from rayrl.tracking.folder_lock import FolderLock

pytestmark = [pytest.mark.ray]


def symptoms(run_dir: Path) -> list[Symptom]:
    return diagnose(examine(run_dir, time.time()))


def status(**changes: object) -> LiveStatus:
    values: dict[str, object] = {
        "time": time.time(),
        "pid": os.getpid(),
        "host": "elsewhere",
        "step": 5,
        "step_s": 1.0,
        "phase": "waiting for 3 groups",
        "phase_s": 1.0,
        "buffered": 1,
        "needed": 3,
        "rollout": {"in_flight": 2},
        "actors": {},
        **changes,
    }
    return LiveStatus(**values)  # type: ignore[arg-type]


def record(run_dir: Path, rank: int, *operations: str) -> None:
    ring = CollectiveRing(run_dir / "logs" / "collectives" / f"train-{rank}.ring")
    for number, operation in enumerate(operations, start=1):
        ring.write(
            CollectiveRecord(
                group="data",
                sequence=number,
                operation=operation,
                shape="[8]",
                dtype="float32",
                reduction="",
                place="training/fsdp_engine.py:140",
            )
        )
    ring.close()


def test_good_run_has_no_symptom_and_exit_code_zero(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(finished_run)])

    assert end.value.code == 0
    assert "nothing wrong was found" in capsys.readouterr().out


def test_run_is_found_by_the_beginning_of_its_id(run_dir: Path) -> None:
    name = json.loads((run_dir / "run.json").read_text())["run_id"]

    assert find_run(name[:8], run_dir.parent) == run_dir
    with pytest.raises(RunFolderError, match=r"neither the folder of a run nor .* \(0 fit\)"):
        find_run("zzzz", run_dir.parent)


def test_diverged_collectives_are_named_with_ranks_line_and_setting(run_dir: Path) -> None:
    record(run_dir, 0, "all_gather", "reduce_scatter")
    record(run_dir, 1, "all_gather", "all_reduce")
    record(run_dir, 2, "all_gather", "reduce_scatter")

    (found,) = symptoms(run_dir)

    assert found.kind == "hang"
    assert "train-1 calls all_reduce #2 on data where the others call reduce_scatter" in found.what
    assert "fsdp_engine.py:140" in found.what
    assert "debug.collectives: check" in found.setting


def test_rank_that_is_one_call_behind_is_no_symptom_while_nothing_hangs(run_dir: Path) -> None:
    record(run_dir, 0, "all_gather", "all_gather")
    record(run_dir, 1, "all_gather")

    assert symptoms(run_dir) == []


def test_stall_and_its_report_are_shown(run_dir: Path) -> None:
    ledger = Ledger.open(run_dir / "ledger.sqlite")
    ledger.record_event("stalled", 5, {"cause": "engine inference-0 is paused", "report": "stall_1.txt"})
    ledger.close()

    (found,) = symptoms(run_dir)

    assert "engine inference-0 is paused" in found.what
    assert "stall_1.txt" in found.evidence[0]


def test_run_that_hangs_now_shows_phase_and_buffers(run_dir: Path) -> None:
    write_status(run_dir / "logs", status(step_s=9000.0, phase_s=8999.0))
    lock = FolderLock.acquire(run_dir / "run.lock")
    try:
        (found,) = symptoms(run_dir)
    finally:
        lock.release()

    assert "no step for 9000 s: the train loop is waiting for 3 groups for 8999 s, with 1 of 3 groups" in found.what


def test_driver_that_tells_nothing_is_named(run_dir: Path) -> None:
    now = time.time()
    write_status(run_dir / "logs", status(time=now))
    lock = FolderLock.acquire(run_dir / "run.lock")
    try:
        (found,) = diagnose(examine(run_dir, now + 500))
    finally:
        lock.release()

    assert f"the driver (pid {os.getpid()} on elsewhere) has told nothing for 500 s" in found.what


def test_deadline_names_its_setting(run_dir: Path) -> None:
    (run_dir / "logs" / "failure.txt").write_text(
        "Traceback\nrayrl.errors.DeadlineExceeded: no group arrived; driver.deadlines.generation_s=5\n"
    )

    (found,) = symptoms(run_dir)

    assert found.kind == "hang" and "driver.deadlines.generation_s" in found.setting


def test_memory_fault_shows_owners_of_devices_and_what_was_resident(run_dir: Path) -> None:
    (run_dir / "logs" / "failure.txt").write_text(
        "ActorError: train-0 died: torch.OutOfMemoryError: CUDA out of memory\n"
    )

    (found,) = symptoms(run_dir)

    assert found.kind == "memory"
    assert any(text.startswith("training: 1 ranks (one rank)") and "GiB" in text for text in found.evidence)
    assert any(text.startswith("inference: 2 engines (transformers)") for text in found.evidence)
    assert "training.micro_batch_tokens" in found.setting


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("mismatch/abs_logprob_diff", 0.4, "engines and trainer disagree about logprobs by 0.4"),
        ("mismatch/abs_logprob_diff", "NaN", "disagree about logprobs by nan"),
        ("staleness/stale_token_share", 0.5, "50% of the tokens of the last step were too old"),
        ("train/skipped_steps", 2, "2 training steps changed nothing"),
    ],
)
def test_metric_that_is_off_is_a_wrong_result(run_dir: Path, metric: str, value: object, words: str) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, metric: value}) + "\n")

    (found,) = symptoms(run_dir)

    assert found.kind == "wrong results" and words in found.what and found.setting


def test_refuted_audit_is_a_wrong_result(run_dir: Path, tamper: Callable[..., None]) -> None:
    tamper("DELETE FROM publications WHERE version = 2 AND engine = 'inference-1'")

    found = symptoms(run_dir)

    assert any("every version was acknowledged" in item.what for item in found)
    assert any("inference-1" in line for line in diagnosis_lines(examine(run_dir, time.time()), found))


def test_run_that_failed_is_told_by_the_ledger_when_the_file_could_not_be_written(run_dir: Path) -> None:
    with closing(Ledger.open(run_dir / "ledger.sqlite")) as ledger:
        ledger.record_event(RUN_FAILED, 5, {"error": "LedgerError: database or disk is full"})
    (run_dir / "logs" / "failure.txt").write_text("")
    (symptom,) = [item for item in symptoms(run_dir) if item.kind == "failure"]
    assert symptom.evidence == ("LedgerError: database or disk is full",)


def test_failure_shows_the_error_and_not_the_note_below_it(run_dir: Path) -> None:
    text = "Traceback:\n  File x\nrayrl.errors.CheckpointError: cannot write: rank 0\n  raised in train-0\n"
    (run_dir / "logs" / "failure.txt").write_text(text)
    (symptom,) = [item for item in symptoms(run_dir) if item.kind == "failure"]
    assert symptom.evidence == ("rayrl.errors.CheckpointError: cannot write: rank 0",)


def test_headline_says_that_a_run_is_finished(run_dir: Path) -> None:
    lines = diagnosis_lines(examine(run_dir, time.time()), [])
    assert re.search(r": finished after \d+ steps$", lines[0]), lines[0]
