"""What the doctor looks at: records of a run, and of a live one its status and the stacks of its actors."""

import fcntl
import json
import math
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rayrl.audit.identity import LEDGER, is_run, read_identity
from rayrl.audit.live_status import LiveStatus, read_status
from rayrl.audit.report import AuditReport, audit_run
from rayrl.audit.run_end import RunEnd, recorded_error, run_end
from rayrl.audit.traces import has_ledger, traces_of_steps
from rayrl.checkpoint.ledger_reader import EventRow, LedgerRecord, last_of_run, read_ledger
from rayrl.checkpoint.store import Checkpoint, CheckpointStore
from rayrl.config.run import RunConfig
from rayrl.errors import CheckpointError, RunFolderError
from rayrl.infra.collective_report import CollectiveReport, report_collectives
from rayrl.infra.stack_dump import dump_stacks
from rayrl.tracking.jsonl_sink import metrics_of, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """A run as the doctor sees it."""

    path: Path
    config: RunConfig | None
    """None if it cannot be read; the audit then says so."""
    end: RunEnd
    """How the last process ended."""
    status: LiveStatus | None
    """Of the last process."""
    status_age_s: float
    failure: str | None
    """What the last process left as `logs/failure.txt`, its traceback included; None if it wrote none."""
    error: str
    """What the ledger says that it failed with; empty if it says nothing of the kind."""
    last_step: int
    """By the ledger; 0 before the first."""
    checkpoint: Checkpoint | None
    """The complete one that a resume would take; None if there is none."""
    damaged: tuple[str, ...]
    """What is wrong with the other folders of checkpoints; a resume is refused if there is nothing but them."""
    free_bytes: int
    """On the disk of the folder."""
    events: tuple[EventRow, ...]
    metrics: Mapping[str, float]
    """Last finite or not finite value of each metric."""
    audit: AuditReport
    collectives: CollectiveReport | None
    stacks: Mapping[str, str]
    """Of the actors of a live run that are on this machine."""
    model_bytes: int
    """Size of the weight files; 0 if they are not here."""

    @property
    def is_alive(self) -> bool:
        """Whether some process holds the folder."""
        return self.end is RunEnd.RUNS

    @property
    def reason(self) -> str:
        """What the last process failed with: its traceback, or else what the ledger has of it; empty if neither."""
        return self.failure or self.error


def find_run(name: str, root: Path) -> Path:
    """Return the folder of a run, given as a path or as the beginning of its id below `root`. RunFolderError."""
    path = Path(name)
    if is_run(path):
        return path
    found = []
    for info in sorted(root.glob("*/run.json")):
        try:
            if str(json.loads(info.read_text(encoding="utf-8"))["run_id"]).startswith(name):
                found.append(info.parent)
        except (OSError, ValueError, KeyError):
            continue
    if len(found) != 1:
        raise RunFolderError(
            f"{name!r} is neither the folder of a run nor the beginning of the id of one below {root} ({len(found)} "
            "fit); give a folder with a run.json, more of the id, or another --root"
        )
    return found[0]


def examine(run_dir: Path, now: float) -> Patient:
    """Read the records of a run; of a live one also take the stacks of its actors on this machine."""
    identity = read_identity(run_dir)
    config, began = identity.config, identity.began if identity.began is not None else -math.inf
    logs = run_dir / "logs"
    status = read_status(logs)
    if status is not None and status.time < began:
        status = None  # of an earlier process
    alive = _is_held(run_dir / "run.lock")
    failure = _read_failure(logs / "failure.txt", began)
    ledger = _read_ledger(run_dir)
    events = ledger.events if ledger is not None else ()
    steps = ledger.live_steps if ledger is not None else []
    last = last_of_run(events)
    if last is not None and last.time < began:
        last = None
    checkpoint, damaged = _checkpoints(run_dir / "checkpoints")
    return Patient(
        path=run_dir,
        config=config,
        end=run_end(
            is_alive=alive,
            is_recorded=_is_recorded(run_dir, ledger),
            last=last,
            failure=failure,
        ),
        status=status,
        status_age_s=max(0.0, now - status.time) if status is not None else math.inf,
        failure=failure,
        error=recorded_error(last),
        last_step=steps[-1].step if steps else 0,
        checkpoint=checkpoint,
        damaged=damaged,
        free_bytes=shutil.disk_usage(run_dir).free,
        events=events,
        metrics=_last_metrics(run_dir / "metrics.jsonl"),
        audit=audit_run(run_dir),
        collectives=report_collectives(logs),
        stacks=_stacks(status) if alive and status is not None else {},
        model_bytes=_size_of_weights(config),
    )


def _read_failure(path: Path, began: float) -> str | None:
    """Return the failure of the process that began then; that of an earlier one stays in the folder."""
    if not path.is_file() or path.stat().st_mtime < began:
        return None
    return path.read_text(encoding="utf-8", errors="replace")


def _is_recorded(run_dir: Path, ledger: LedgerRecord | None) -> bool:
    """Return whether the ledger tells how processes ended: one that was lost does not, nor one of an old rayrl."""
    if ledger is None:
        return not (has_ledger(run_dir) or traces_of_steps(run_dir))
    return last_of_run(ledger.events) is not None or not ledger.steps


def _read_ledger(run_dir: Path) -> LedgerRecord | None:
    """Return the ledger; None if there is none that can be read, of which the audit tells."""
    try:
        return read_ledger(run_dir / LEDGER)
    except CheckpointError:
        return None


def _checkpoints(root: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the last complete checkpoint, and what is wrong with others."""
    try:
        whole, damaged = CheckpointStore(root).survey()
    except CheckpointError as error:
        return None, (str(error),)  # of a later rayrl, or not to be read
    return whole[-1] if whole else None, tuple(str(item) for item in damaged)


def _size_of_weights(config: RunConfig | None) -> int:
    if config is None:
        return 0
    return sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))


def _is_held(lock: Path) -> bool:
    if not lock.is_file():
        return False
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _last_metrics(path: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    try:
        for row in read_rows(path) if path.is_file() else ():
            found |= metrics_of(row)
    except ValueError:
        return found  # a line that is no JSON: those before it count
    return found


def _stacks(status: LiveStatus) -> dict[str, str]:
    if status.host != socket.gethostname():
        return {}
    here = {name: actor for name, actor in status.actors.items() if actor.get("is_here")}
    return {name: dump_stacks(int(actor["pid"])) for name, actor in here.items()}
