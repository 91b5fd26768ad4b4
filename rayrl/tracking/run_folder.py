"""The folder of one run: everything that the run writes lies below it.

    config.yaml       resolved config        metrics.jsonl   metrics, one object per line
    run.json          id, command, versions  checkpoints/    rollouts/    logs/    export/
    run.lock          held while it runs     ledger.sqlite   what became of each prompt

`run.json` is written last: a folder without it is not a run.
"""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rayrl.errors import RunFolderError
from rayrl.tracking.folder_lock import FolderLock
from rayrl.tracking.provenance import git_state, package_versions
from rayrl.utils.atomic_file import write_atomically

_LOCK = "run.lock"
_INFO = "run.json"
_CONFIG = "config.yaml"
_FOLDERS = ("checkpoints", "rollouts", "logs", "export")
FAILURE_FILE = "failure.txt"
"""In `logs`: the last failure."""
_LONGEST_CAUSE = 300


class RunFolder:
    """A folder that belongs to one run, locked by this process until `close`."""

    def __init__(self, path: Path, run_id: str, resumed: bool, origin: dict[str, Any], lock: FolderLock) -> None:
        self.path = path
        self.run_id = run_id
        self.resumed = resumed
        """True if the folder was there before and is continued."""
        self._origin = origin
        self._config_yaml: str | None = None
        self._lock = lock

    @classmethod
    def create(
        cls, run_dir: str | Path, config_yaml: str, config_digest: str, command: Sequence[str], resume: bool
    ) -> "RunFolder":
        """Make the folder of a new run, or open the one of an earlier run if `resume` is set.

        An opened folder keeps its files as they are until `accept_resume`, so that a resume that is refused
        (another model, a damaged checkpoint) changes nothing. With `resume` and no folder a new run starts.
        Raises RunFolderError, with nothing written, if the folder holds something else, if it holds a run and
        `resume` is not set, or if another process runs in it.
        """
        path = Path(run_dir).absolute()
        try:
            _refuse_foreign(path)
            path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock.acquire(path / _LOCK)
        except OSError as error:
            raise _cannot_create(path, str(error.strerror)) from error
        try:
            return cls._fill(path, config_yaml, _origin(command, config_digest), resume, lock)
        except OSError as error:
            lock.release()
            raise RunFolderError(f"cannot write to run folder {path}: {error.strerror}") from error
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _fill(cls, path: Path, config_yaml: str, origin: dict[str, Any], resume: bool, lock: FolderLock) -> "RunFolder":
        if (path / _INFO).exists():
            if not resume:
                raise RunFolderError(
                    f"run folder {path} already holds a run{_start_of(path)}; continue it with `--resume auto`, "
                    "choose another run.name, or remove the folder"
                )
            folder = cls(path, _read_info(path / _INFO)["run_id"], resumed=True, origin=origin, lock=lock)
            folder._config_yaml = config_yaml
            lock.write_owner()
            return folder
        lock.write_owner()
        folder = cls(path, str(uuid.uuid4()), resumed=False, origin=origin, lock=lock)
        write_atomically(folder.config_path, config_yaml.encode())
        for name in _FOLDERS:
            (path / name).mkdir(exist_ok=True)
        _write_info(path / _INFO, {"format": 1, "run_id": folder.run_id, **origin, "resumes": []})
        return folder

    def saved_config(self) -> str:
        """Return the text of `config.yaml`; of a resumed run that of the earlier part until `accept_resume`."""
        try:
            return self.config_path.read_text(encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"cannot read {self.config_path}: {error.strerror}") from error

    def accept_resume(self) -> None:
        """Record that the run goes on: `config.yaml` becomes the new one, the old one is kept beside it.

        To be called once the configs are found compatible and the checkpoint is open; does nothing for a new run.
        """
        if self._config_yaml is None:
            return
        info = _read_info(self.path / _INFO)
        for name in _FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        earlier = self.saved_config()
        if earlier != self._config_yaml:
            write_atomically(self.path / f"config.before_resume_{len(info['resumes']) + 1}.yaml", earlier.encode())
            write_atomically(self.config_path, self._config_yaml.encode())
        _write_info(self.path / _INFO, {**info, "resumes": [*info["resumes"], self._origin]})
        self._config_yaml = None

    @property
    def config_path(self) -> Path:
        """The resolved config."""
        return self.path / _CONFIG

    @property
    def metrics_path(self) -> Path:
        """File of the jsonl sink."""
        return self.path / "metrics.jsonl"

    @property
    def ledger_path(self) -> Path:
        """Record of prompts and publications."""
        return self.path / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoint store."""
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """One Parquet file per step."""
        return self.path / "rollouts"

    @property
    def logs(self) -> Path:
        """Output of workers, reports of failures."""
        return self.path / "logs"

    @property
    def export(self) -> Path:
        """Final weights as a model folder."""
        return self.path / "export"

    @property
    def has_begun(self) -> bool:
        """Whether anything was trained or saved in this folder, by whichever process."""
        return _has_begun(self.path)

    def discard(self) -> None:
        """Remove the folder with all that is in it. Only for a new run that could not be started."""
        assert not self.resumed, "the folder of an earlier run is never removed"
        shutil.rmtree(self.path)

    def close(self) -> None:
        """Let other processes use the folder; a second call does nothing."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_output(run_dir: str | Path) -> str:
    """Return in words what the folder of a run is now. RunFolderError, as `RunFolder.create` raises it, if no run can
    be written there; nothing is written.
    """
    path = Path(run_dir).absolute()
    _refuse_foreign(path)
    place = path
    # Not `Path.exists`, which raises where a folder above may not be searched.
    while not os.path.exists(place):
        place = place.parent
    fault = None if place.is_dir() else errno.ENOTDIR
    if fault is None and not os.access(place, os.W_OK | os.X_OK):
        fault = errno.EROFS if os.statvfs(place).f_flag & os.ST_RDONLY else errno.EACCES
    if fault is not None:
        raise _cannot_create(path, os.strerror(fault))
    if not (path / _INFO).exists():
        return f"output {run_dir}: can be written"
    return f"output {run_dir}: holds a run{_start_of(path)}, which `--resume auto` continues"


def _cannot_create(path: Path, reason: str) -> RunFolderError:
    return RunFolderError(f"cannot create run folder {path}: {reason}; change run.output_root")


def _start_of(path: Path) -> str:
    """Return how a run that never began came to its end, with a space before; nothing for one that began."""
    if _has_begun(path):
        return ""
    try:
        report = (path / "logs" / FAILURE_FILE).read_text(encoding="utf-8")
    except OSError:
        return " that was interrupted while it started"
    return f" that failed while it started ({_cause(report)})"


def _cause(report: str) -> str:
    """Return class and first line of the error that a traceback ends with."""
    lines = report.rstrip().splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    text = next((line for line in after if line and not line[0].isspace()), "see logs/" + FAILURE_FILE)
    name, colon, message = text.partition(": ")
    text = name.rpartition(".")[2] + colon + message
    return text if len(text) <= _LONGEST_CAUSE else text[: _LONGEST_CAUSE - 3] + "..."


def _has_begun(path: Path) -> bool:
    """Return whether the folder of a run holds more than what is there before the first step."""
    if (path / "ledger.sqlite").exists():
        return True
    return any(any((path / name).iterdir()) for name in _FOLDERS if name != "logs" and (path / name).is_dir())


def _refuse_foreign(path: Path) -> None:
    """Raise if the folder holds anything but a run, or what is left of a run that was killed in `create`."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunFolderError(f"run folder {path} is a file; choose another run.name or run.output_root")
    names = {item.name for item in path.iterdir() if not item.name.endswith(".tmp")}
    if not names or _INFO in names:
        return
    half_made = _LOCK in names and names <= {_LOCK, _CONFIG, *_FOLDERS}
    if not half_made or any(any((path / name).iterdir()) for name in _FOLDERS if name in names):
        shown = ", ".join(sorted(names)[:3])
        raise RunFolderError(
            f"folder {path} is not the folder of a run: it has {shown} and no {_INFO}; "
            "choose another run.name or run.output_root, or remove it"
        )


def _origin(command: Sequence[str], config_digest: str) -> dict[str, Any]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "config_digest": config_digest,
        "git": git_state(Path.cwd()),
        "versions": package_versions(),
    }


def _read_info(path: Path) -> dict[str, Any]:
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read {path}: {error}; the run cannot be continued") from error
    if not isinstance(info, dict) or not {"run_id", "resumes"} <= info.keys():
        raise RunFolderError(f"{path} was not written by rayrl: it lacks run_id or resumes; choose another run.name")
    return info


def _write_info(path: Path, info: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(info, indent=2) + "\n").encode())
