"""Whole runs in a process of their own, which can be killed; and what they leave on disk."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from small_runs import small_run
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from rayrl.audit.report import audit_run
from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.store import CheckpointStore
from rayrl.config.run import RunConfig

POLL_S = 0.02
RUN_S = 240.0


def small_config(model: Path, root: Path, name: str, **changes: Any) -> RunConfig:
    """Return a run of 6 steps on sums; `changes` are dotted paths with `__` for the dot."""
    return small_run(
        model,
        root,
        **{
            "run__name": name,
            "run__seed": 3,
            "rollout__num_workers": 2,
            "driver__num_steps": 6,
            "training__optimizer__lr": 3e-3,
            "checkpoint": {"every": 1, "keep_last": 3},
            **changes,
        },
    )


class DriverProcess:
    """One `rayrl train --resume auto` in a session of its own, on the cluster at `address`."""

    def __init__(self, config: RunConfig, address: str, resume: str = "auto") -> None:
        self.run_dir = config.run_dir
        self._config_path = Path(config.run.output_root) / f"{config.run.name}.yaml"
        self._config_path.parent.mkdir(parents=True, exist_ok=True)
        self._config_path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self._output = self._config_path.with_suffix(".log").open("ab")
        self._log_start = self._output.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rayrl.cli.main", "train", str(self._config_path), "--resume", resume],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "RAY_ADDRESS": address},
        )

    @property
    def output(self) -> str:
        """What all drivers of this run have printed."""
        return self._config_path.with_suffix(".log").read_text(errors="replace")

    def members(self) -> dict[str, int]:
        """Return name and process id of all actors that this driver has started, those that died since included."""
        text = self._config_path.with_suffix(".log").read_bytes()[self._log_start :].decode(errors="replace")
        return {
            name: int(pid)
            for name, pid in re.findall(r"((?:train|inference|rollout)-\d+) \(node [^)]*pid (\d+)\)", text)
        }

    def wait(self) -> int:
        """Return the exit code."""
        return self.process.wait(RUN_S)

    def reaches(self, is_time: Callable[[], bool]) -> bool:
        """Return True once `is_time()`; False if the run ended before."""
        pause = threading.Event()
        while self.process.poll() is None:
            if is_time():
                return True
            pause.wait(POLL_S)
        return False

    def kill_when(self, is_time: Callable[[], bool], number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal once `is_time()`, and wait for the end; False if the run ended before."""
        if not self.reaches(is_time):
            return False
        self.process.send_signal(number)
        self.process.wait(RUN_S)
        return True

    def close(self) -> None:
        """Kill what is left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(RUN_S)
        self._output.close()


def ledger_position(run_dir: Path) -> int:
    """Return how many transactions the ledger holds, as a reader beside the run sees it; 0 before there is one."""
    path = run_dir / "ledger.sqlite"
    if not path.exists():
        return 0
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return int(connection.execute("SELECT value FROM meta WHERE name = 'position'").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.OperationalError:
        return 0


def check_audit(run_dir: Path) -> None:
    """The records of the run prove all that an audit asks for, or at least refute nothing."""
    report = audit_run(run_dir)
    assert [finding for finding in report.findings if finding.verdict == "refuted"] == []


def outcomes(run_dir: Path) -> list[Any]:
    """Return the live outcomes."""
    ledger = Ledger.open(run_dir / "ledger.sqlite", read_only=True)
    try:
        return ledger.outcomes()
    finally:
        ledger.close()


def final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return everything that the newest checkpoint holds of the training group."""
    newest = CheckpointStore(run_dir / "checkpoints", keep_last=1).latest()
    assert newest is not None
    folder = str(newest.path / "train")
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in known.items()
        if hasattr(entry, "size")
    }
    with warnings.catch_warnings(action="ignore"):
        load(state, checkpoint_id=folder, no_dist=True)
    return state


def deterministic_config(model: Path, root: Path, name: str, num_steps: int, **changes: Any) -> RunConfig:
    """Return a run in deterministic mode, with a checkpoint after every second step."""
    return small_config(
        model,
        root,
        name,
        **{
            "run__deterministic": True,
            "driver__max_staleness": 0,
            "driver__num_steps": num_steps,
            "inference__num_engines": 2,
            "checkpoint__every": 2,
            **changes,
        },
    )


def check_same(undisturbed: RunConfig, disturbed: RunConfig) -> None:
    """Weights, moments, random state and live outcomes are the same, bit by bit."""
    expected, actual = final_tensors(undisturbed.run_dir), final_tensors(disturbed.run_dir)
    assert expected.keys() == actual.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, actual[name])] == []
    assert outcomes(disturbed.run_dir) == outcomes(undisturbed.run_dir)
