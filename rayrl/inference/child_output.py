"""What child processes write to stderr and stdout while and after they start: passed on, and the last lines kept.

    child --write--> pipe --thread--> our own stderr
                              └-----> last lines

Children inherit the pipe when they are started inside the `with`; afterwards our own output is as before. The thread
ends when the last child is gone, and not before: a pipe that nobody reads would stop the children when it is full.
"""

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

_NUM_LINES = 200
_LINE_BYTES = 1 << 16
"""What is kept of a line without an end, such as a progress bar."""
_STDOUT, _STDERR = 1, 2


class ChildOutput:
    """The last lines of the children of this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._thread: Thread | None = None
        self._lost: OSError | None = None

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
        lost = "" if self._lost is None else f" (some were not passed on: {self._lost})"
        return "\n".join([f"last lines of {self._name}{lost}:", *(f"  | {line}" for line in lines)])

    def root_cause(self) -> str | None:
        """Return the last line that looks like the final line of a traceback, the first of several such lines."""
        # A copy: the thread goes on to add lines.
        for line in list(self._lines):
            text = line.split("] ")[-1].strip()
            name = text.split(":")[0]
            if name.endswith(("Error", "Exception")) and name.replace(".", "").replace("_", "").isalnum():
                return text
        return None

    def _pump(self, reader: int, target: int) -> None:
        rest = b""
        while data := os.read(reader, 65536):
            self._pass_on(target, data)
            *lines, rest = (rest + data).split(b"\n")
            self._lines.extend(map(_text, lines))
            rest = rest[-_LINE_BYTES:]
        if rest:
            self._lines.append(_text(rest))
        os.close(reader)
        os.close(target)

    def _pass_on(self, target: int, data: bytes) -> None:
        """Write to our own output; what does not go there, on a full disk, say, is in the last lines all the same."""
        try:
            while data:
                data = data[os.write(target, data) :]
        except OSError as error:
            self._lost = error


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
