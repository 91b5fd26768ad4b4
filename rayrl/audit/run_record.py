"""Everything that an audit reads, from the folder of a run; reading changes nothing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from rayrl.audit.step_rollouts import StepRollouts, read_step
from rayrl.checkpoint.ledger_reader import LedgerRecord, read_ledger
from rayrl.checkpoint.manifest import MANIFEST, check_sizes, read_manifest
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import CHECKPOINT_NAME
from rayrl.config.loader import parse_section
from rayrl.config.run import RunConfig
from rayrl.errors import CheckpointError, ConfigError, RunFolderError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The records of one run. What could not be read is in `unreadable`, by the path inside the folder."""

    path: Path
    config: RunConfig
    ledger: LedgerRecord
    rollouts: Mapping[int, StepRollouts]
    """By step."""
    checkpoints: Mapping[str, RunState]
    """State of each complete checkpoint, by the name of its folder."""
    unreadable: Mapping[str, str]
    """Why a file that is there cannot be used."""


def read_run(run_dir: Path) -> RunRecord:
    """Read the folder of a run.

    Raises RunFolderError if it is not the folder of a reinforcement learning run, ConfigError if this rayrl cannot
    parse its config, and CheckpointError if its ledger is missing or damaged.
    """
    config = read_config(run_dir)
    unreadable: dict[str, str] = {}
    # Of a run that goes on the ledger must be the newest: it knows of every file that was there before.
    rollouts = sorted((run_dir / "rollouts").glob("step_*.parquet"))
    checkpoints = _read_checkpoints(run_dir, unreadable)
    ledger = read_ledger(run_dir / "ledger.sqlite")
    return RunRecord(
        path=run_dir,
        config=config,
        ledger=ledger,
        rollouts=_read_rollouts(rollouts, unreadable),
        checkpoints=checkpoints,
        unreadable=unreadable,
    )


def read_config(run_dir: Path) -> RunConfig:
    """Return the config of a run from its folder. RunFolderError or ConfigError."""
    if not (run_dir / "run.json").is_file():
        raise RunFolderError(f"{run_dir} is not the folder of a run: it has no run.json")
    path = run_dir / "config.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a config")
    if "rollout" not in data:
        raise RunFolderError(f"{run_dir} is not the folder of a reinforcement learning run; others keep no ledger")
    return parse_section(RunConfig, data, source=str(path))


def run_info(run_dir: Path) -> dict[str, Any]:
    """Return the content of `run.json`. RunFolderError if it cannot be read."""
    if not (run_dir / "run.json").is_file():
        raise RunFolderError(
            f"{run_dir} is not the folder of a run: it has no run.json; give `<run.output_root>/<run.name>`"
        )
    try:
        info: dict[str, Any] = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read {run_dir / 'run.json'}: {error}") from error
    return info


def _read_rollouts(paths: Sequence[Path], unreadable: dict[str, str]) -> dict[int, StepRollouts]:
    found: dict[int, StepRollouts] = {}
    for path in paths:
        try:
            found[int(path.stem.removeprefix("step_"))] = read_step(path)
        except (OSError, ValueError, pa.ArrowException) as error:
            size = f"{path.stat().st_size} bytes" if path.is_file() else "gone"
            unreadable[f"rollouts/{path.name}"] = f"truncated or damaged ({size}): {str(error).splitlines()[0]}"
    return found


def _read_checkpoints(run_dir: Path, unreadable: dict[str, str]) -> dict[str, RunState]:
    found: dict[str, RunState] = {}
    folders = (path for path in (run_dir / "checkpoints").glob("step_*") if CHECKPOINT_NAME.match(path.name))
    for path in sorted(folders):
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
            found[path.name] = RunState.from_json((path / "state.json").read_text(encoding="utf-8"))
        except (OSError, CheckpointError) as error:
            if (path / MANIFEST).exists():
                unreadable[f"checkpoints/{path.name}"] = str(error)
    return found
