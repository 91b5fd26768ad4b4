"""Seconds by the name of what they were spent on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimes:
    """Adds up the seconds of phases; used by one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count what runs inside as `phase`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
