"""What the doctor looks at: records of a run, and of a live one its status and the stacks of its actors."""

import fcntl
import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rayrl.audit.live_status import LiveStatus, read_status
from rayrl.audit.report import AuditReport, audit_run
from rayrl.audit.run_record import read_config
from rayrl.checkpoint.ledger_reader import EventRow, read_ledger
from rayrl.config.run import RunConfig
from rayrl.errors import CheckpointError, RunFolderError
from rayrl.infra.collective_report import CollectiveReport, report_collectives
from rayrl.infra.stack_dump import dump_stacks
from rayrl.tracking.jsonl_sink import metrics_of, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """A run as the doctor sees it."""

    path: Path
    config: RunConfig
    is_alive: bool
    """Some process holds the folder."""
    status: LiveStatus | None
    status_age_s: float
    failure: str | None
    """What the last process failed with, its traceback included; None if it wrote nothing of the kind."""
    events: tuple[EventRow, ...]
    metrics: Mapping[str, float]
    """Last finite or not finite value of each metric."""
    audit: AuditReport
    collectives: CollectiveReport | None
    stacks: Mapping[str, str]
    """Of the actors of a live run that are on this machine."""
    model_bytes: int
    """Size of the weight files; 0 if they are not here."""


def find_run(name: str, root: Path) -> Path:
    """Return the folder of a run, given as a path or as the beginning of its id below `root`. RunFolderError."""
    path = Path(name)
    if (path / "run.json").is_file():
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
    config = read_config(run_dir)
    logs = run_dir / "logs"
    status = read_status(logs)
    alive = _is_held(run_dir / "run.lock")
    failure = logs / "failure.txt"
    try:
        events = read_ledger(run_dir / "ledger.sqlite").events
    except CheckpointError:
        events = ()
    return Patient(
        path=run_dir,
        config=config,
        is_alive=alive,
        status=status,
        status_age_s=max(0.0, now - status.time) if status is not None else math.inf,
        failure=failure.read_text(encoding="utf-8", errors="replace") if failure.is_file() else None,
        events=events,
        metrics=_last_metrics(run_dir / "metrics.jsonl"),
        audit=audit_run(run_dir),
        collectives=report_collectives(logs),
        stacks=_stacks(status) if alive and status is not None else {},
        model_bytes=sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors")),
    )


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
    if path.is_file():
        for row in read_rows(path):
            found |= metrics_of(row)
    return found


def _stacks(status: LiveStatus) -> dict[str, str]:
    if status.host != socket.gethostname():
        return {}
    here = {name: actor for name, actor in status.actors.items() if actor.get("is_here")}
    return {name: dump_stacks(int(actor["pid"])) for name, actor in here.items()}
