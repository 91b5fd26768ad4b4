"""`logs/status.json`: what a running run does, written by its driver every few seconds and read by `rayrl doctor`."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STATUS_FILE = "status.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """A run at the moment of writing."""

    time: float
    """Seconds since the epoch."""
    pid: int
    """Of the driver."""
    host: str
    """Of the driver."""
    step: int
    step_s: float
    """Since the last step finished."""
    phase: str
    """What the train loop does."""
    phase_s: float
    buffered: int
    needed: int
    rollout: Mapping[str, Any]
    actors: Mapping[str, Mapping[str, Any]]
    """Process id and host of each actor."""


def write_status(logs: Path, status: LiveStatus) -> None:
    """Replace the file; not synced, since it is only for whoever looks now. Raises OSError."""
    temporary = logs / f".{STATUS_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(status), default=str) + "\n", encoding="utf-8")
    temporary.replace(logs / STATUS_FILE)


def read_status(logs: Path) -> LiveStatus | None:
    """Return the last status; None if there is none that can be read."""
    try:
        return LiveStatus(**json.loads((logs / STATUS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def age_s(status: LiveStatus) -> float:
    """Return how old a status is."""
    return max(0.0, time.time() - status.time)
