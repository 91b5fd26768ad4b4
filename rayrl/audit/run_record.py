"""Everything that an audit reads, from the folder of a run; reading changes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rayrl.audit.identity import LEDGER, Identity
from rayrl.audit.step_rollouts import StepRollouts, read_step
from rayrl.checkpoint.ledger_reader import LedgerRecord, read_ledger
from rayrl.checkpoint.manifest import MANIFEST, check_sizes, read_manifest
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import CHECKPOINT_NAME
from rayrl.config.run import RunConfig
from rayrl.errors import CheckpointError


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


def read_run(run_dir: Path, identity: Identity, config: RunConfig) -> RunRecord:
    """Read the folder of a run, given what it says of itself. CheckpointError if its ledger is missing or damaged."""
    unreadable = dict(identity.faults)
    # Of a run that goes on the ledger must be the newest: it knows of every file that was there before.
    rollouts = sorted((run_dir / "rollouts").glob("step_*.parquet"))
    checkpoints = _read_checkpoints(run_dir, unreadable)
    ledger = read_ledger(run_dir / LEDGER)
    return RunRecord(
        path=run_dir,
        config=config,
        ledger=ledger,
        rollouts=_read_rollouts(rollouts, unreadable),
        checkpoints=checkpoints,
        unreadable=unreadable,
    )


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
