"""Runs that did not leave in order: what doctor and audit say of each end; folders are built by hand."""

import json
import os
import time
from pathlib import Path

import pytest
from hand_built import DATASET, begin, record, record_steps, save

from rayrl.audit.doctor import diagnose, diagnosis_lines
from rayrl.audit.doctor_record import Patient, examine
from rayrl.audit.live_status import LiveStatus, write_status
from rayrl.audit.report import audit_run
from rayrl.audit.run_end import RunEnd
from rayrl.checkpoint.ledger_events import RUN_ENDED, RUN_FAILED, RUN_INTERRUPTED, RUN_STARTED
from rayrl.cli.main import main
from rayrl.config.run import RunConfig
from rayrl.tracking.folder_lock import FolderLock

_NO_VLLM = (
    "Traceback (most recent call last):\n  File x\n"
    "rayrl.errors.EngineError: vLLM cannot be imported (No module named 'vllm'); set inference.engine.type\n"
    "raised in inference-0 during start of inference\n"
)
_FULL = (
    "CheckpointError: cannot write the training state: rank 0: RuntimeError: unexpected pos 704 vs 598; "
    "the disk may be full: 0.0 MB are free, the state has 10.3 MB"
)


@pytest.fixture
def run_dir(repo_root: Path, tmp_path: Path) -> Path:
    """A run that has its folder and nothing else."""
    overrides = [f"run.output_root={tmp_path}", "tracking.rollout_log=false"]
    return begin(RunConfig.load(repo_root / "configs" / "quickstart_grpo.yaml", overrides))


def write_failure(run_dir: Path, text: str) -> None:
    (run_dir / "logs" / "failure.txt").write_text(text)


def told(run_dir: Path) -> tuple[Patient, list[str]]:
    patient = examine(run_dir, time.time())
    return patient, diagnosis_lines(patient, diagnose(patient))


def write_old_status(run_dir: Path, step: int, seconds: float = 0.0) -> None:
    status = LiveStatus(
        time=time.time() + seconds,
        pid=os.getpid(),
        host="elsewhere",
        step=step,
        step_s=1.0,
        phase="waiting for 3 groups",
        phase_s=1.0,
        buffered=1,
        needed=3,
        rollout={},
        actors={},
    )
    write_status(run_dir / "logs", status)


def test_failure_comes_first_and_refutes_nothing_when_a_run_failed_while_it_started(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_failure(run_dir, _NO_VLLM)

    codes = []
    for command in ("doctor", "audit"):
        with pytest.raises(SystemExit) as end:
            main([command, str(run_dir)])
        codes.append(end.value.code)

    out = capsys.readouterr().out
    assert codes == [1, 1]
    assert "failure: failed while it started: EngineError: vLLM cannot be imported (No module named 'vllm')" in out
    assert "start it again with `--resume auto`" in out and "logs/failure.txt has the whole traceback" in out
    assert "no step was made and nothing was recorded; the run failed while it started, see logs/failure.txt" in out
    assert "refute" not in out.lower() and "wrong results" not in out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 1, "time": 1.0, "reward/mean": 0.5}\n'),
        ("rollouts/step_000001.parquet", ""),
        ("audit.json", "{}"),
        ("export/config.json", "{}"),
    ],
)
def test_missing_ledger_is_refuted_when_anything_else_shows_that_steps_were_made(
    run_dir: Path, name: str, content: str
) -> None:
    write_failure(run_dir, _NO_VLLM)
    (run_dir / name).write_text(content)

    (finding,) = audit_run(run_dir).findings

    assert finding.verdict == "refuted"
    assert name in finding.violations[0] and "there is no ledger" in finding.violations[0]
    assert any(line.startswith("records: the audit refutes") for line in told(run_dir)[1])


def test_missing_ledger_is_refuted_when_there_is_a_checkpoint(run_dir: Path) -> None:
    save(run_dir, 1)

    assert "checkpoints/step_000001" in audit_run(run_dir).findings[0].violations[0]
    assert examine(run_dir, 0.0).end is RunEnd.UNKNOWN


def test_messages_alone_are_no_trace_of_a_step(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"time": 1.0, "message": "run folder: x"}\n')

    assert audit_run(run_dir).findings[0].verdict == "unproven"


@pytest.mark.parametrize(
    ("kind", "detail"), [(RUN_INTERRUPTED, {}), (RUN_FAILED, {"error": "CancelledError: "})], ids=["now", "old ledger"]
)
def test_second_signal_is_no_failure_with_a_file_that_does_not_exist(
    run_dir: Path, kind: str, detail: dict[str, object]
) -> None:
    record_steps(run_dir, 11)
    save(run_dir, 10)
    record(run_dir, kind, 11, **detail)

    lines = told(run_dir)[1]

    assert lines[0].endswith(": does not run, 11 steps are done")
    assert lines[2] == "failure: interrupted by a second signal before it could save"
    assert lines[4] == (
        "  change: go on with `--resume auto`: from step 10 (checkpoints/step_000010, the last complete one); "
        "what came since is done again, 1 step"
    )
    assert "failure.txt" not in "\n".join(lines) and "CancelledError" not in "\n".join(lines)


def test_full_disk_is_named_once_with_the_space_and_the_checkpoint_to_go_on_from(run_dir: Path) -> None:
    record_steps(run_dir, 10)
    save(run_dir, 8, size=4_000_000)
    record(run_dir, RUN_FAILED, 10, error=_FULL + "\nraised in train-0 during checkpoint of step 10")
    write_failure(run_dir, f"Traceback:\n  File x\nrayrl.errors.{_FULL}\nraised in train-0\n")

    (symptom,) = [item for item in diagnose(examine(run_dir, time.time())) if item.kind == "failure"]

    assert (symptom.what, symptom.evidence) == ("the disk was full", (_FULL,))
    assert symptom.setting.startswith("free space (a checkpoint takes 4.0 MB, ")
    assert "then go on with `--resume auto`: from step 8 (checkpoints/step_000008" in symptom.setting
    assert "failure.txt" not in symptom.setting


@pytest.mark.parametrize("is_file", [True, False])
def test_failure_file_that_could_not_be_written_is_not_pointed_to(run_dir: Path, is_file: bool) -> None:
    record_steps(run_dir, 2)
    record(run_dir, RUN_FAILED, 2, error="LedgerError: database or disk is full")
    if is_file:
        write_failure(run_dir, "")

    (symptom,) = [item for item in diagnose(examine(run_dir, time.time())) if item.kind == "failure"]

    assert "free space (" in symptom.setting and "no checkpoint is complete" in symptom.setting
    assert "logs/failure.txt could not be written" in symptom.setting


def test_other_failure_is_told_once_with_how_to_go_on(run_dir: Path) -> None:
    record_steps(run_dir, 3)
    save(run_dir, 2)
    record(run_dir, RUN_FAILED, 3, error="BudgetExhausted: 34 groups without a usable trajectory")
    write_failure(run_dir, "Traceback:\nrayrl.errors.BudgetExhausted: 34 groups without a usable trajectory\n")

    (symptom,) = [item for item in diagnose(examine(run_dir, time.time())) if item.kind == "failure"]

    assert symptom.evidence == ("BudgetExhausted: 34 groups without a usable trajectory",)
    assert symptom.setting.startswith(
        "logs/failure.txt has the whole traceback; once the cause is gone, `--resume auto`"
    )


def test_process_that_was_killed_is_named_with_how_to_go_on(run_dir: Path) -> None:
    record_steps(run_dir, 3)

    patient, lines = told(run_dir)

    assert patient.end is RunEnd.VANISHED
    assert lines[2].startswith("failure: its process ended without a word: it was killed")
    assert "`--resume auto`: from the first step, no checkpoint is complete" in lines[-1]


def test_resume_is_not_promised_from_checkpoints_that_are_all_damaged(run_dir: Path) -> None:
    record_steps(run_dir, 3)
    save(run_dir, 2)
    (run_dir / "checkpoints" / "step_000002" / "weights.bin").unlink()

    (symptom,) = [item for item in diagnose(examine(run_dir, time.time())) if item.kind == "failure"]

    assert "`--resume auto`, once a checkpoint is put back from a copy: step_000002 is incomplete" in symptom.setting


@pytest.mark.parametrize(
    ("step", "tail"), [(1, "does not run, 11 steps are done"), (11, "was last seen 0 s ago: waiting for 3 groups")]
)
def test_status_that_is_older_than_the_ledger_is_not_told(run_dir: Path, step: int, tail: str) -> None:
    record_steps(run_dir, 11)
    write_old_status(run_dir, step)

    assert told(run_dir)[1][0].endswith(tail)


def test_status_and_failure_of_an_earlier_process_are_not_those_of_the_last_one(run_dir: Path) -> None:
    record_steps(run_dir, 2)
    write_failure(run_dir, _NO_VLLM)
    os.utime(run_dir / "logs" / "failure.txt", (1.0, 1.0))
    write_old_status(run_dir, 2, seconds=-5000.0)
    lock = FolderLock.acquire(run_dir / "run.lock")
    try:
        starting = examine(run_dir, time.time())
    finally:
        lock.release()
    record(run_dir, RUN_STARTED, 2, dataset=DATASET)
    record(run_dir, RUN_ENDED, 2, status="done", dataset=DATASET, outstanding=0)

    ended = examine(run_dir, time.time())

    assert (starting.end, starting.status, starting.failure) == (RunEnd.RUNS, None, None)
    assert [item.kind for item in diagnose(starting) if item.kind == "hang"] == [], "it starts, and does not hang"
    assert ended.end is RunEnd.DONE
    assert [item.kind for item in diagnose(ended) if item.kind == "failure"] == []


def test_resume_that_fails_while_it_starts_is_told_with_its_own_error(run_dir: Path) -> None:
    record_steps(run_dir, 2)
    record(run_dir, RUN_FAILED, 2, error="BudgetExhausted: earlier")
    info = json.loads((run_dir / "run.json").read_text())
    later = {"created": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() + 3600))}
    (run_dir / "run.json").write_text(json.dumps({**info, "resumes": [later]}))
    write_failure(run_dir, _NO_VLLM)
    os.utime(run_dir / "logs" / "failure.txt", (time.time() + 3700,) * 2)

    lines = told(run_dir)[1]

    assert "failed while it started: EngineError: vLLM cannot be imported" in lines[2]
    assert "earlier" not in "\n".join(lines)
