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

_SIGNAL = signal.SIGUSR2
_WAIT_S = 2.0
_POLL_S = 0.05
_PY_SPY_S = 20.0
_open: IO[str] | None = None


def answer_stack_dumps() -> None:
    """Let this process write its stacks to its file on the signal; a second call does nothing."""
    global _open
    if _open is None:
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
    if not path.is_file():
        return f"process {pid} does not answer stack dumps, or is gone"
    before = path.stat().st_size
    try:
        os.kill(pid, _SIGNAL)
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


def _path(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"rayrl-stacks-{os.getuid()}-{pid}.txt"
