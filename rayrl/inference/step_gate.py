"""Lets a test decide when an engine takes its next step, without sleeping."""

from collections.abc import Callable
from threading import Lock


class StepGate:
    """A number of steps that an engine may take; it waits, and serves its other commands, when there are none left."""

    def __init__(self, steps: int = 0) -> None:
        self._steps = steps
        self._lock = Lock()
        self._wake: Callable[[], None] = lambda: None

    def allow(self, steps: int) -> None:
        """Allow `steps` more."""
        with self._lock:
            self._steps += steps
        self._wake()

    @property
    def is_open(self) -> bool:
        """Whether a step is allowed."""
        return self._steps > 0

    def take(self) -> bool:
        """Use up one step; False if there is none."""
        with self._lock:
            if self._steps <= 0:
                return False
            self._steps -= 1
            return True

    def on_allow(self, wake: Callable[[], None]) -> None:
        """Call `wake` from now on whenever steps are added."""
        self._wake = wake
