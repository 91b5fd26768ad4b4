"""Checkpoints of one run: complete or invisible.

    begin(step)   root/.tmp-step_000010-x9k2   workers write their files inside
    commit        state.json → fsync files and folders → manifest.json → fsync → rename to root/step_000010
                  → fsync root → remove checkpoints that the retention rule does not keep
    abandon       remove the temporary folder

A process that dies anywhere leaves the earlier checkpoints, or those and the new one, never a part. All writing
processes and this one must see the same file system.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rayrl.checkpoint.damaged import DamagedCheckpoint, set_aside
from rayrl.checkpoint.disk import Disk
from rayrl.checkpoint.manifest import (
    MANIFEST,
    STATE,
    FileEntry,
    Manifest,
    NewerFormatError,
    check_digests,
    check_sizes,
    file_digest,
    read_manifest,
)
from rayrl.checkpoint.retention import Candidate, RetentionRule, to_remove
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.score import SCORE, score_from_bytes, score_to_bytes
from rayrl.errors import CheckpointError
from rayrl.utils.logger import get_logger

_logger = get_logger("checkpoint")

_TEMPORARY = ".tmp-"
CHECKPOINT_NAME = re.compile(r"^step_\d{6,}(\.\d+)?$")
"""Folders of complete checkpoints; all others are not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint that is being written; its path may be sent to workers on the same file system."""

    path: Path
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def version(self) -> int:
        return self.manifest.version

    def load_state(self) -> RunState:
        """Return the driver's state. CheckpointError if it cannot be read."""
        try:
            return RunState.from_json((self.path / STATE).read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path / STATE}: {error.strerror}") from error


class CheckpointStore:
    """Writes, finds and removes the checkpoints below `root`. One process writes; others may read meanwhile.

    Nothing is created or removed before the first `begin`, so that looking for a checkpoint leaves no trace.
    """

    def __init__(
        self, root: Path, keep_last: int = 1, disk: Disk | None = None, *, rule: RetentionRule | None = None
    ) -> None:
        """`rule` says what is kept, `keep_last` where nothing but the newest ones is."""
        self._root = root
        self._rule = rule if rule is not None else RetentionRule(keep_last=keep_last)
        self._disk = disk if disk is not None else Disk()
        self._pending: set[Path] = set()
        self._swept = False
        self._told: set[Path] = set()
        self._committed: dict[int, Path] = {}
        self._scores: dict[int, float] = {}

    def begin(self, step: int) -> PendingCheckpoint:
        """Make the folder of a new checkpoint; the first call removes what dead runs left. Raises CheckpointError."""
        path = self._root / f"{_TEMPORARY}step_{step:06d}-{secrets.token_hex(4)}"
        if not self._swept:
            self.remove_stale()
            self._swept = True
        with _as_checkpoint_error("create", path):
            self._disk.make_folder(path)
        self._pending.add(path)
        return PendingCheckpoint(path=path, step=step)

    def commit(self, pending: PendingCheckpoint, state: RunState, expected: Iterable[str] = ()) -> Path:
        """Make a checkpoint visible and return its folder; then remove those that the rule does not keep.

        `expected` are files that workers must have written, relative to the folder. On failure, a full disk or a
        missing file, CheckpointError is raised, the temporary folder is removed and older checkpoints are intact.
        """
        assert state.step == pending.step, f"state of step {state.step} in the checkpoint of step {pending.step}"
        try:
            with _as_checkpoint_error("write", pending.path):
                self._seal(pending.path, state, expected)
                target = self._free_name(f"step_{pending.step:06d}")
                self._disk.rename(pending.path, target)
                self._disk.sync_folder(self._root)
        except CheckpointError:
            self.abandon(pending)
            raise
        self._pending.discard(pending.path)
        self._committed[state.version] = target
        if state.version in self._scores:
            self._write_score(target, self._scores[state.version])
        self._prune()
        return target

    def record_score(self, version: int, value: float) -> None:
        """Note the value of the rule's metric, measured on `version`, before or after its checkpoint is complete.

        A checkpoint that another process wrote has its score already or gets none: after a resume the same version
        number may stand for other weights.
        """
        self._scores[version] = value
        if version in self._committed:
            self._write_score(self._committed[version], value)

    def forget_scores(self) -> None:
        """Versions made from now on are others than those of the same numbers before."""
        self._scores.clear()
        self._committed.clear()

    def abandon(self, pending: PendingCheckpoint) -> None:
        """Remove a checkpoint that will not be finished; a second call does nothing."""
        self._pending.discard(pending.path)
        self._try_remove(pending.path)

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint that was committed last, sizes checked, contents not; None if there is none.

        Incomplete ones are passed over with a warning. Raises CheckpointError for one of a later rayrl.
        """
        return max(self.complete(), key=lambda item: item.manifest.serial, default=None)

    def complete(self) -> list[Checkpoint]:
        """Return all complete checkpoints, sizes checked, in the order committed. Warns of each other one once."""
        found, damaged = self.survey()
        for item in damaged:
            if item.path not in self._told:
                self._told.add(item.path)
                _logger.warning("passed over: checkpoint %s in %s", item, self._root)
        return found

    def survey(self) -> tuple[list[Checkpoint], list[DamagedCheckpoint]]:
        """Return the complete checkpoints in the order committed, sizes checked, and those that are not whole.

        Raises CheckpointError for one of a later rayrl.
        """
        found: list[Checkpoint] = []
        damaged: list[DamagedCheckpoint] = []
        with _as_checkpoint_error("look for a", self._root):
            for path in self._folders():
                try:
                    manifest = read_manifest(path)
                    check_sizes(path, manifest)
                except NewerFormatError:
                    raise
                except CheckpointError as error:
                    damaged.append(DamagedCheckpoint.from_error(path, error))
                    continue
                found.append(Checkpoint(path=path, manifest=manifest))
        return sorted(found, key=lambda item: item.manifest.serial), damaged

    def set_aside(self, damaged: DamagedCheckpoint) -> Path | None:
        """Rename a folder that is no whole checkpoint, and return where it is; None, with a warning, if it stays.

        Only for the process that holds the run's lock.
        """
        try:
            target = set_aside(damaged, self._disk)
        except OSError as error:
            _logger.warning("cannot set %s aside: %s; an audit will refuse it", damaged.path, error.strerror)
            return None
        return target

    def open(self, path: str | Path, run_id: str | None = None) -> Checkpoint:
        """Return the checkpoint in a folder after reading all of it and comparing digests.

        Raises CheckpointError: nothing there, not a checkpoint, incomplete, damaged, of a later format, or, with
        `run_id`, of another run.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        if run_id is not None and manifest.run_id != run_id:
            raise CheckpointError(
                f"checkpoint {folder} belongs to run {manifest.run_id}, this folder is of run {run_id}; "
                "resume it in its own run folder"
            )
        check_digests(folder, manifest)
        return Checkpoint(path=folder, manifest=manifest)

    def adopt(self, name: str, fill: Callable[[Path], None]) -> Path:
        """Make a checkpoint `name` of what `fill` puts into an empty folder, and return its folder.

        Where `name` is taken, by a damaged checkpoint for example, it gets another one of the same step.
        It becomes visible when `fill` has returned. Nothing is left where that fails. Raises what `fill` raises.
        """
        with _as_checkpoint_error("create", self._root):
            folder = self._root / f"{_TEMPORARY}{name}-{secrets.token_hex(4)}"
            self._disk.make_folder(folder)
        try:
            fill(folder)
            with _as_checkpoint_error("write", folder):
                for path in sorted(folder.rglob("*"), reverse=True):
                    if path.is_dir():
                        self._disk.sync_folder(path)
                    else:
                        self._disk.sync_file(path)
                self._disk.sync_folder(folder)
                target = self._free_name(name)
                self._disk.rename(folder, target)
                self._disk.sync_folder(self._root)
        except BaseException:
            self._try_remove(folder)
            raise
        return target

    def remove_stale(self) -> None:
        """Remove temporary folders of earlier processes. Only for the process that holds the run's lock."""
        if not self._root.is_dir():
            return
        for path in self._root.iterdir():
            if path.name.startswith(_TEMPORARY) and path not in self._pending:
                _logger.info("removing %s, left by a process that ended while it wrote a checkpoint", path)
                self._try_remove(path)

    def _seal(self, folder: Path, state: RunState, expected: Iterable[str]) -> None:
        self._disk.write(folder / STATE, state.to_json().encode())
        paths = sorted(folder.rglob("*"))
        names = [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
        missing = sorted(set(expected) - set(names))
        if missing:
            raise CheckpointError(
                f"checkpoint {folder} lacks {missing}, which workers have written elsewhere; "
                "run.output_root must be on a file system that all nodes share"
            )
        files: dict[str, FileEntry] = {}
        for name in names:
            self._disk.sync_file(folder / name)
            files[name] = FileEntry(size=(folder / name).stat().st_size, xxh3=file_digest(folder / name))
        for path in reversed([item for item in paths if item.is_dir()]):
            self._disk.sync_folder(path)
        manifest = Manifest(
            serial=max((item.manifest.serial for item in self.complete()), default=0) + 1,
            step=state.step,
            version=state.version,
            run_id=state.run_id,
            config_digest=state.config_digest,
            files=files,
        )
        self._disk.write(folder / MANIFEST, manifest.to_bytes())
        self._disk.sync_file(folder / MANIFEST)
        self._disk.sync_folder(folder)

    def _free_name(self, name: str) -> Path:
        """`step_000010`, or `step_000010.1` where that is taken: replacing it would leave a moment with neither."""
        path, base = self._root / name, name.split(".")[0]
        attempt = 0
        while path.exists():
            attempt += 1
            path = self._root / f"{base}.{attempt}"
        return path

    def _prune(self) -> None:
        complete = {item.manifest.serial: item for item in self.complete()}
        candidates = [
            Candidate(serial=serial, step=item.step, score=self._score_of(item.path))
            for serial, item in complete.items()
        ]
        for old in (complete[candidate.serial] for candidate in to_remove(candidates, self._rule)):
            # Out of sight first: removing a tree takes many calls, and half a checkpoint must never be seen.
            hidden = self._root / f"{_TEMPORARY}old-{old.path.name}-{secrets.token_hex(4)}"
            try:
                self._disk.rename(old.path, hidden)
            except OSError as error:
                _logger.warning("cannot remove old checkpoint %s: %s", old.path, error.strerror)
                continue
            self._try_remove(hidden)

    def _write_score(self, folder: Path, value: float) -> None:
        assert self._rule.metric is not None, "scores are of the rule's metric"
        try:
            self._disk.write(folder / SCORE, score_to_bytes(self._rule.metric, value))
        except OSError as error:
            _logger.warning("cannot note %s of %s: %s", self._rule.metric, folder, error.strerror)

    def _score_of(self, folder: Path) -> float | None:
        if self._rule.metric is None:
            return None
        try:
            return score_from_bytes((folder / SCORE).read_bytes(), self._rule.metric)
        except OSError:
            return None

    def _try_remove(self, path: Path) -> None:
        if not path.exists():
            return
        try:
            self._disk.remove_tree(path)
        except OSError as error:
            _logger.warning("cannot remove %s: %s", path, error.strerror)

    def _folders(self) -> Iterator[Path]:
        if self._root.is_dir():
            yield from sorted(
                path for path in self._root.iterdir() if CHECKPOINT_NAME.match(path.name) and path.is_dir()
            )


@contextmanager
def _as_checkpoint_error(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot {action} checkpoint {path}: {error.strerror or error}; older checkpoints are intact; "
            "free space or rights there, or change run.output_root"
        ) from error
