"""The stacks of all threads of an actor, whatever it is stuck in.

Each actor asks `faulthandler` at start to write its stacks to a file on SIGUSR2: the handler runs in C, so that it
works inside a collective or any other call that never returns to Python. Whoever diagnoses sends the signal and reads
the file. Where py-spy is installed it is used instead; it also shows native frames.
"""

import atexit
import faulthandler
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

import psutil

_SIGNAL = signal.SIGUSR2
_WAIT_S = 2.0
_POLL_S = 0.05
_PY_SPY_S = 20.0
_CLOCK_SLACK_S = 1.0
_NAME = f"rayrl-stacks-{os.getuid()}-{{pid}}.txt"
_open: IO[str] | None = None


def answer_stack_dumps() -> None:
    """Let this process write its stacks to its file on the signal; a second call does nothing."""
    global _open
    if _open is None:
        _remove_files_of_the_dead()
        path = _path(os.getpid())
        path.unlink(missing_ok=True)
        _open = path.open("w", encoding="utf-8")
        atexit.register(path.unlink, missing_ok=True)
        faulthandler.register(_SIGNAL, file=_open, all_threads=True, chain=False)


def dump_stacks(pid: int) -> str:
    """Return the stacks of a process of this node that answers dumps, or one line that says why there are none."""
    spy = shutil.which("py-spy")
    if spy is not None:
        done = _run([spy, "dump", "--pid", str(pid)])
        if done is not None:
            return done
    path = _path(pid)
    if not _is_of_this_process(path, pid):
        return f"process {pid} does not answer stack dumps, or is gone"
    before = path.stat().st_size
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return f"process {pid} is gone"
    except OSError as error:
        return f"process {pid} cannot be asked: {error.strerror}"
    deadline = time.monotonic() + _WAIT_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = path.stat().st_size
        if now > before and now == size:
            break
        size = now
    text = path.read_bytes()[before:].decode(errors="replace").strip()
    return text or f"process {pid} wrote no stacks within {_WAIT_S:g} s: it is stopped, or in an uninterruptible call"


def _run(command: list[str]) -> str | None:
    """Return the output of a command, or None if it failed: it may not have the right to look into the process."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _is_of_this_process(path: Path, pid: int) -> bool:
    """Return whether the process that has this id now wrote the file, and not a killed one that had the id before.

    The signal ends a process that does not handle it, so that no process is ever asked on the word of an old file.
    """
    try:
        return path.stat().st_mtime >= psutil.Process(pid).create_time() - _CLOCK_SLACK_S
    except (FileNotFoundError, psutil.NoSuchProcess):
        return False


def _remove_files_of_the_dead() -> None:
    """Remove what killed processes could not remove at their end."""
    for path in Path(tempfile.gettempdir()).glob(_NAME.format(pid="*")):
        pid = path.stem.rpartition("-")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)


def _path(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / _NAME.format(pid=pid)
