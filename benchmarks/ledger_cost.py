"""What the records of a run cost, as a share of its step time.

    python benchmarks/ledger_cost.py RUN_DIR [--repeats 5]

Takes the ledger and the rollout log of a finished run and does again, on the same disk, what its driver and trainer
did to record each step: the transactions of the ledger, the digest of the trajectories, and the audit at its end. The
step time is that of the run's own metrics. Prints the median of the repeats.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rayrl.audit.report import audit_run
from rayrl.checkpoint.group_digest import group_digest
from rayrl.checkpoint.ledger import SENDER, Ledger, PromptOutcome, PublishedVersion
from rayrl.checkpoint.ledger_reader import LedgerRecord, read_ledger
from rayrl.infra.collective_recorder import CollectiveRecorder, CollectiveRing
from rayrl.tracking.jsonl_sink import read_series
from rayrl.tracking.rollout_log import read_rollouts, rollout_path


def replay(record: LedgerRecord, folder: Path) -> list[float]:
    """Write the ledger again and return the seconds of each step."""
    seconds = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        ledger = Ledger.open(Path(place) / "ledger.sqlite")
        for step in record.live_steps:
            rows = [row for row in record.live_prompts if row.stamp.position == step.stamp.position]
            acks = [
                row
                for row in record.publications
                if row.version == step.version and row.acknowledged and row.stamp.superseded_by is None
            ]
            published = PublishedVersion(
                version=step.version,
                sent=acks[0].digest if acks else "",
                acknowledged={row.engine: row.digest for row in acks if row.engine != SENDER},
            )
            outcomes = [
                PromptOutcome(
                    prompt_id=row.prompt_id,
                    outcome=row.outcome,
                    reason=row.reason,
                    oldest_version=row.oldest_version,
                    newest_version=row.newest_version,
                )
                for row in rows
            ]
            start = time.perf_counter()
            ledger.record_step(step.step, step.version, outcomes, step.detail, published if acks else None)
            seconds.append(time.perf_counter() - start)
        ledger.close()
    return seconds


def sync_seconds(folder: Path, count: int = 20) -> float:
    """Return the median seconds in which a ledger with one new row is put on the disk, as before each checkpoint."""
    seconds = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        ledger = Ledger.open(Path(place) / "ledger.sqlite")
        for number in range(count):
            ledger.record_event("note", number, {})
            start = time.perf_counter()
            ledger.sync()
            seconds.append(time.perf_counter() - start)
        ledger.close()
    return statistics.median(seconds)


def digests(run_dir: Path, steps: list[int]) -> list[float]:
    """Return the seconds that the trainer needed for the digest of each step."""
    seconds = []
    for step in steps:
        batches = read_rollouts(rollout_path(run_dir / "rollouts", step)).to_batches()
        start = time.perf_counter()
        group_digest(batches)
        seconds.append(time.perf_counter() - start)
    return seconds


def note_seconds(count: int = 20_000) -> float:
    """Return the CPU seconds of noting one collective in `debug.collectives: record`."""
    with tempfile.TemporaryDirectory() as place:
        recorder = CollectiveRecorder(CollectiveRing(Path(place) / "a.ring"))
        start = time.thread_time()
        for _ in range(count):
            recorder.note(
                "all_gather", group="data", rank=0, members=("a", "b"), shape="[1024]", dtype="float32", reduction=""
            )
        return (time.thread_time() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    run_dir: Path = arguments.run_dir
    record = read_ledger(run_dir / "ledger.sqlite")
    steps = [row.step for row in record.live_steps]
    sync_s = sync_seconds(run_dir)
    step_s = statistics.median(value for _, value in read_series(run_dir / "metrics.jsonl", "time/step_s"))
    ledger_s = statistics.median(statistics.median(replay(record, run_dir)) for _ in range(arguments.repeats))
    digest_s = statistics.median(statistics.median(digests(run_dir, steps)) for _ in range(arguments.repeats))
    start = time.perf_counter()
    report = audit_run(run_dir)
    audit_s = time.perf_counter() - start
    share = (ledger_s + digest_s) / step_s
    print(f"steps {len(steps)}, median step {step_s * 1e3:.1f} ms")
    print(f"ledger {ledger_s * 1e3:.2f} ms a step, digest {digest_s * 1e3:.2f} ms a step: {share:.2%} of the step")
    print(f"putting the ledger on the disk, once per checkpoint, {sync_s * 1e3:.2f} ms")
    print(f"audit of the whole run {audit_s * 1e3:.0f} ms, {'passed' if report.passed else 'not passed'}")
    print(f"recording one collective {note_seconds() * 1e6:.1f} us of CPU")


if __name__ == "__main__":
    main()
