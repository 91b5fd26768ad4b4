"""A save that is written in a thread while training goes on.

    caller: start(write) ... train ... poll() ... train ... poll() -> True     thread: write()

One at a time: the copy of the state that `write` holds is the memory that a save costs, and it is let go when the
write has ended. What the write failed with is kept and raised by the next `poll`.
"""

import threading
from collections.abc import Callable

from rayrl.errors import CheckpointError


class BackgroundSave:
    """At most one write at a time. Used from one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Run `write` in a thread. CheckpointError if the last write has not ended: its copy is still in memory."""
        self.check_free()
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def check_free(self) -> None:
        """CheckpointError if a write is under way."""
        if self._thread is not None and self._thread.is_alive():
            raise CheckpointError(
                "the training state is still being written from the last checkpoint; raise checkpoint.every, or write "
                "to faster storage"
            )

    def poll(self, wait_s: float = 0.0) -> bool:
        """Return whether the write has ended, after at most `wait_s`; True too where none was started.

        Raises what the write failed with, once.
        """
        if self._thread is not None:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - kept for `poll`, which raises it to the driver
            self._error = error
