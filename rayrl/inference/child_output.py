"""What child processes write to stderr and stdout while and after they start: passed on, and the last lines kept.

    child --write--> pipe --thread--> our own stderr
                              └-----> last lines

Children inherit the pipe when they are started inside the `with`; afterwards our own output is as before. The thread
ends when the last child is gone.
"""

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

_NUM_LINES = 200
_STDOUT, _STDERR = 1, 2


class ChildOutput:
    """The last lines of the children of this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._thread: Thread | None = None

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Let children that start now write to the pipe. Not to be entered twice at once in one process."""
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        stdout, stderr = os.dup(_STDOUT), os.dup(_STDERR)
        self._thread = Thread(
            target=self._pump, args=(reader, os.dup(stderr)), name=f"{self._name}-output", daemon=True
        )
        self._thread.start()
        os.dup2(writer, _STDOUT)
        os.dup2(writer, _STDERR)
        os.close(writer)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(stdout, _STDOUT)
            os.dup2(stderr, _STDERR)
            os.close(stdout)
            os.close(stderr)

    def wait_end(self, timeout_s: float) -> None:
        """Wait until all children are gone and their last lines are here, at most `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def clear(self) -> None:
        """Forget the lines so far: what they say is dealt with."""
        self._lines.clear()

    def tail(self, num_lines: int = 30) -> str:
        """Return the last lines under a heading, indented."""
        lines = list(self._lines)[-num_lines:]
        if not lines:
            return f"{self._name} wrote nothing"
        return "\n".join([f"last lines of {self._name}:", *(f"  | {line}" for line in lines)])

    def root_cause(self) -> str | None:
        """Return the last line that looks like the final line of a traceback, the first of several such lines."""
        for line in self._lines:
            text = line.split("] ")[-1].strip()
            name = text.split(":")[0]
            if name.endswith(("Error", "Exception")) and name.replace(".", "").replace("_", "").isalnum():
                return text
        return None

    def _pump(self, reader: int, target: int) -> None:
        rest = b""
        while data := os.read(reader, 65536):
            os.write(target, data)
            *lines, rest = (rest + data).split(b"\n")
            self._lines.extend(line.decode(errors="replace").rstrip() for line in lines)
        os.close(reader)
        os.close(target)
