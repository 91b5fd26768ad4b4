"""A lock on a run's folder that one process holds and that vanishes with it."""

import fcntl
import os
from pathlib import Path

from rayrl.errors import RunFolderError


class FolderLock:
    """An exclusive `flock` on a file. The kernel gives it back when its process ends, however it ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, path: Path) -> "FolderLock":
        """Take the lock at once. RunFolderError names the process that holds it, or why locks do not work there."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunFolderError(f"cannot open lock {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunFolderError(
                f"run folder {path.parent} is in use by the process with pid {holder}; "
                "wait for it, stop it, or choose another run.name"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise RunFolderError(
                f"the file system of {path.parent} cannot lock files ({error.strerror}); "
                "set run.output_root to one that can"
            ) from error
        return cls(path, descriptor)

    def write_owner(self) -> None:
        """Leave this process's id in the file, for the message that the next one gets."""
        assert self._descriptor is not None, "the lock was released"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back; a second call does nothing. The file stays: removing it would race with a waiter."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
