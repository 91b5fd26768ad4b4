"""Metrics of a run: what a sink is, and the fan-out to all sinks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rayrl.utils.logger import get_logger

_logger = get_logger("tracking")


class Sink(Protocol):
    """One place where metrics go. May raise: the tracker then leaves it out for the rest of the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take some metrics of a step; a step may come in several parts, and again after a resume."""
        ...

    def message(self, text: str) -> None:
        """Take one line for people."""
        ...

    def close(self) -> None:
        """Write out what is held back and free everything; no other call follows."""
        ...


class Tracker:
    """Sends metrics to all sinks. A sink that fails is disabled with one warning; it never ends the run."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._failed: list[Sink] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send some metrics of a step, named `area/name`, to all sinks that work."""
        self._each(lambda sink: sink.log(step, metrics))

    def message(self, text: str) -> None:
        """Send one line for people to all sinks that work."""
        self._each(lambda sink: sink.message(text))

    def close(self) -> None:
        """Close all sinks, the failed ones too: they may hold threads or the terminal. A second call does nothing."""
        self._each(lambda sink: sink.close())
        failed, self._failed, self._sinks = self._failed, [], []
        for sink in failed:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - boundary `tracking`: it was reported when it first failed
                _logger.debug("closing disabled sink %s: %s", type(sink).__name__, error)

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:  # noqa: BLE001 - boundary `tracking`: a failing sink never ends a run
                name = type(sink).__name__
                _logger.warning(
                    "%s failed and is off for the rest of the run: %s: %s", name, type(error).__name__, error
                )
                self._sinks.remove(sink)
                self._failed.append(sink)
