"""A folder that appears complete or not at all: written under a hidden name beside, fsynced, renamed."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayrl.utils.atomic_file import sync_folder


@contextmanager
def staged_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends without an exception, else is removed.

    A killed process leaves at most a hidden `.NAME.*.tmp` beside `target`, never a part under the name itself.

    Raises FileExistsError if `target` exists and `replace` is off, also when another process made it meanwhile.
    """
    if not replace and target.exists():
        raise FileExistsError(f"{str(target)!r} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.tmp"
    staging.mkdir()
    try:
        yield staging
        _sync_tree(staging)
        _publish(staging, target, replace=replace)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, target: Path, *, replace: bool) -> None:
    if replace and target.exists():
        outdated = staging.with_name(staging.name.replace(".tmp", ".old.tmp"))
        target.rename(outdated)
        try:
            staging.rename(target)
        except OSError:
            outdated.rename(target)
            raise
        sync_folder(target.parent)
        shutil.rmtree(outdated, ignore_errors=True)
        return
    try:
        staging.rename(target)
    except OSError as error:
        if target.exists():
            raise FileExistsError(f"{str(target)!r} was made by another process meanwhile") from error
        raise
    sync_folder(target.parent)


def _sync_tree(folder: Path) -> None:
    """Flush all files, and make them as readable as their folder: safetensors writes for the owner alone."""
    permissions = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            path.chmod(permissions)
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
