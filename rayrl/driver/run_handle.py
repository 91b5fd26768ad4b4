"""A run in a thread of the caller's process."""

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from rayrl.driver.result import RunResult
from rayrl.errors import ActorError, DeadlineExceeded, EngineError

if TYPE_CHECKING:
    from rayrl.driver.run import Run


class RunHandle:
    """A run in a thread."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._target, name="rayrl-run", daemon=True)
        self._thread.start()

    def _target(self) -> None:
        async def main() -> RunResult:
            self._event_loop = asyncio.get_running_loop()
            return await self._run.main()

        try:
            self._result = asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - kept for `wait`, which raises it in the caller's thread
            self._error = error

    def status(self) -> dict[str, Any]:
        """Return what the run does: phase, step, version, groups in flight and buffered."""
        if self._error is not None:
            return {"phase": "failed", "error": f"{type(self._error).__name__}: {self._error}"}
        if self._result is not None:
            return {"phase": self._result.status, "step": self._result.steps}
        return self._run.status()

    def stop(self) -> None:
        """Ask the run to finish its step, save and leave; `wait` then returns a result with status `stopped`."""
        if self._event_loop is not None and self._thread.is_alive():
            self._event_loop.call_soon_threadsafe(self._run.request_stop)

    def scale_inference(self, num_engines: int, timeout_s: float = 10.0) -> None:
        """Have this many engines from now on; returns at once, engines come and go while the run goes on.

        Raises: ConfigError outside `supervision.min_engines` and `max_engines`; EngineError if the run has no engines.
        """
        if self._event_loop is None or not self._thread.is_alive():
            raise EngineError("the run is not running")

        async def scale() -> None:
            self._run.scale_inference(num_engines)

        asyncio.run_coroutine_threadsafe(scale(), self._event_loop).result(timeout_s)

    def wait(self, timeout_s: float | None = None) -> RunResult:
        """Return the result. Raises what ended the run, or DeadlineExceeded if it still runs after `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the run still goes on after {timeout_s} s: {self.status()}")
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise ActorError("the run ended without a result")
        return self._result
