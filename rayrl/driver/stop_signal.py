"""Graceful stop on SIGTERM and Ctrl-C: finish the step, save, leave. A second signal leaves at once."""

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

    async def wait(self) -> None:
        """Return once a stop is asked for."""
        await self._event.wait()

    def install(self) -> None:
        """Listen to signals for the current task; only in the main thread, where Python delivers them."""
        self._task = asyncio.current_task()
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.request, signal.Signals(number).name)

    def uninstall(self) -> None:
        """Give the signals back."""
        self._task = None
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
