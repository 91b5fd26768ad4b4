"""Graceful stop on SIGTERM and Ctrl-C: finish the step, save, leave. A second signal leaves at once.

So does the first one while the run still starts: there is no step to finish.
"""

import asyncio
import signal
import threading

from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.stop")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Set by a signal or by `RunHandle.stop`; the loops look at it between steps."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._reason: str | None = None
        self._task: asyncio.Task[object] | None = None
        self._has_begun = False

    @property
    def reason(self) -> str | None:
        """Why the run is to stop; None while it is to go on."""
        return self._reason

    def request(self, reason: str) -> None:
        """Ask for a stop after the step; the second time the run is cancelled where it stands."""
        if self._reason is None:
            self._reason = reason
            _LOGGER.warning("%s: finishing the step, then saving and leaving; once more leaves at once", reason)
            self._event.set()
        elif self._task is not None:
            _LOGGER.warning("%s again: leaving at once", reason)
            self._task.cancel()

    def begin(self) -> None:
        """From now on there is a step to finish, and a state to save."""
        self._has_begun = True

    async def wait(self) -> None:
        """Return once a stop is asked for."""
        await self._event.wait()

    def install(self) -> None:
        """Listen to signals for the current task; only in the main thread, where Python delivers them.

        To be called again after Ray was joined, which may set handlers of its own.
        """
        self._task = asyncio.current_task()
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)

    def _on_signal(self, name: str) -> None:
        if self._has_begun or self._task is None:
            self.request(name)
        else:
            _LOGGER.warning("%s before the first step: leaving at once", name)
            self._task.cancel()

    def uninstall(self) -> None:
        """Give the signals back."""
        self._task = None
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
