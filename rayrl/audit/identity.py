"""Which run a folder is of: its `run.json` and `config.yaml`. A damaged one is a finding, not an error."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from rayrl.config.digest import digest_of
from rayrl.config.loader import parse_section
from rayrl.config.run import RunConfig
from rayrl.config.supervised import PreferenceRunConfig, RewardModelRunConfig, SFTRunConfig
from rayrl.errors import ConfigError, RunFolderError

INFO = "run.json"
CONFIG = "config.yaml"
LEDGER = "ledger.sqlite"
_SUPERVISED = (SFTRunConfig.loop_name, PreferenceRunConfig.loop_name, RewardModelRunConfig.loop_name)
_COPY = f"take {INFO} from a copy of the folder: without it the run cannot be continued"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a run's folder says of the run."""

    run_id: str
    """Empty if `run.json` cannot be used."""
    began: float | None
    """When the last process that was let into the folder came, seconds since the epoch; None if that is not known."""
    config: RunConfig | None
    """None if `config.yaml` cannot be used."""
    faults: Mapping[str, str]
    """By file, why it cannot be used, and what to do."""


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run, its `run.json` lost or not."""
    return (path / INFO).is_file() or (path / LEDGER).is_file()


def read_identity(run_dir: Path) -> Identity:
    """Read both files.

    Raises RunFolderError if the folder is not that of a reinforcement learning run, and ConfigError if its config is
    whole, but not one that this rayrl can parse.
    """
    if not is_run(run_dir):
        raise RunFolderError(
            f"{run_dir} is not the folder of a run: it has no {INFO}; give `<run.output_root>/<run.name>`"
        )
    faults: dict[str, str] = {}
    origins = _read_origins(run_dir / INFO, faults)
    config = _read_config(run_dir, {str(item.get("config_digest")) for item in origins}, faults)
    return Identity(
        run_id=str(origins[0]["run_id"]) if origins else "",
        began=_time_of(origins[-1]) if origins else None,
        config=config,
        faults=faults,
    )


def _read_origins(path: Path, faults: dict[str, str]) -> list[dict[str, Any]]:
    """Return what `run.json` says of each process that ran here, the first one's with the id of the run."""
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        faults[INFO] = f"it is missing; {_COPY}"
        return []
    except (OSError, ValueError) as error:
        faults[INFO] = f"{error}; {_COPY}"
        return []
    if not isinstance(info, dict) or "run_id" not in info:
        faults[INFO] = f"it lacks the id of the run; {_COPY}"
        return []
    return [info, *info.get("resumes", [])]


def _time_of(origin: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(origin.get("created"))).timestamp()
    except ValueError:
        return None


def _read_config(run_dir: Path, digests: set[str], faults: dict[str, str]) -> RunConfig | None:
    path = run_dir / CONFIG
    kept = sorted(item.name for item in run_dir.glob("config.before_resume_*.yaml"))
    advice = f"take {CONFIG} from a copy of the folder" + (
        f"; {kept[-1]} is that of an earlier part of the run" if kept else ""
    )
    try:
        text = path.read_text(encoding="utf-8")
        data = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        faults[CONFIG] = f"{shorten(str(error), 200, placeholder=' ...')}; {advice}"
        return None
    if isinstance(data, dict) and "rollout" not in data:
        _refuse_supervised(run_dir, data)
    try:
        if not isinstance(data, dict):
            raise ConfigError("it holds no config")
        return parse_section(RunConfig, data, source=str(path))
    except ConfigError as error:
        if digest_of(text) in digests:
            raise ConfigError(
                f"{error}; {path} is as the run wrote it: read it with the rayrl that it was made with, whose version "
                f"and commit are in {INFO}"
            ) from error
        cause = shorten(str(error), 200, placeholder=" ...")
        faults[CONFIG] = f"it is not what the run wrote ({cause}); {advice}"
        return None


def _refuse_supervised(run_dir: Path, data: Mapping[str, Any]) -> None:
    for name in _SUPERVISED:
        if name in data:
            command = name.replace("_", "-")
            raise RunFolderError(
                f"{run_dir} is the folder of a run of `rayrl {command}`; only runs of `rayrl train`, reinforcement "
                "learning, keep the ledger that is read here. Of this one see metrics.jsonl and, if it failed, "
                "logs/failure.txt"
            )
