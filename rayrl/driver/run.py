"""`Run`: a reinforcement learning run from config to result.

    preflight -> run folder (locked) -> cluster -> fleet -> weights to engines -> both loops -> save, export, leave

Both loops share one event loop and the objects that `Assembly` puts together. Shutdown: a stop (signal, `stop()`) ends
the train loop after its step; a failure ends it at its next wait; then, in both cases, the rollout loop is cancelled,
and the fleet is closed: actors leave in order or are killed after `deadlines.shutdown_s`.
"""

import asyncio
import sys
import time
from contextlib import closing
from typing import Any

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.store import Checkpoint
from rayrl.config.digest import digest_of
from rayrl.config.run import RunConfig
from rayrl.driver.assembly import Assembly, resolved_yaml
from rayrl.driver.finished import finished_result
from rayrl.driver.fleet import start_fleet
from rayrl.driver.joining import joined_cluster
from rayrl.driver.preflight import check_run
from rayrl.driver.result import RunResult
from rayrl.driver.resume import Resume, find_checkpoint, set_damaged_aside
from rayrl.driver.run_failure import keeping_failure
from rayrl.driver.run_handle import RunHandle
from rayrl.driver.stop_signal import StopSignal
from rayrl.errors import EngineError
from rayrl.infra.placement_plan import plan_placement
from rayrl.tracking.metrics import Tracker
from rayrl.tracking.registry import make_tracker
from rayrl.tracking.run_folder import RunFolder
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver")


class Run:
    """One reinforcement learning run.

    Example:
        result = Run(RunConfig.load("configs/quickstart_grpo.yaml")).train()
    """

    def __init__(self, config: RunConfig, resume: Resume = "never") -> None:
        """Nothing is started or written here.

        Args:
            config: the whole config.
            resume: `never` wants a new run folder; `auto` goes on from the newest complete checkpoint of the run's
                folder, or starts anew if there is none; a path goes on from that checkpoint.
        """
        self._config = config
        self._resume = resume
        self._loop: Assembly | None = None
        self._stop: StopSignal | None = None

    def train(self) -> RunResult:
        """Run to the end in this thread. SIGTERM and Ctrl-C finish the step, save and leave.

        Raises: ConfigError and its kinds before anything is started; PlacementError; and what ended the run.
        """
        return asyncio.run(self.main())

    def start(self) -> RunHandle:
        """Run in a thread of this process and return at once."""
        return RunHandle(self)

    def status(self) -> dict[str, Any]:
        """Return what the run does at the moment."""
        return {"phase": "not started"} if self._loop is None else self._loop.status()

    async def main(self) -> RunResult:
        """Run to the end in the running event loop; `train` and `RunHandle` call it."""
        self._stop = StopSignal()
        config = self._config
        for note in check_run(config):
            _LOGGER.info("%s", note)
        text = resolved_yaml(config)
        folder = RunFolder.create(config.run_dir, text, digest_of(text), sys.argv, resume=self._resume != "never")
        with folder, keeping_failure(folder):
            point = await asyncio.to_thread(find_checkpoint, folder, config, self._resume)
            finished = await asyncio.to_thread(finished_result, folder, config, point.checkpoint, text)
            await asyncio.to_thread(set_damaged_aside, folder, point)
            if finished is not None:
                _LOGGER.info("all %d steps are done already; driver.num_steps asks for no more", finished.steps)
                return finished
            folder.accept_resume()
            return await self._in_cluster(folder, point.checkpoint)

    async def _in_cluster(self, folder: RunFolder, checkpoint: Checkpoint | None) -> RunResult:
        config = self._config
        assert self._stop is not None
        async with joined_cluster(plan_placement(config).total.get("CPU", 0.0), self._stop):
            tracker = make_tracker(config.tracking, folder, config.driver.num_steps)
            try:
                return await self._with_fleet(folder, checkpoint, tracker)
            finally:
                tracker.close()

    async def _with_fleet(self, folder: RunFolder, checkpoint: Checkpoint | None, tracker: Tracker) -> RunResult:
        assert self._stop is not None
        start = time.monotonic()
        tracker.message(f"run folder: {folder.path}")
        fleet = await start_fleet(self._config)
        tracker.message(f"all actors are ready after {time.monotonic() - start:.1f} s")
        try:
            with closing(Ledger.open(folder.ledger_path)) as ledger:
                assembly = Assembly.build(self._config, fleet, folder, ledger, tracker, self._stop)
                self._loop = assembly
                self._stop.begin()
                try:
                    return await assembly.run(checkpoint)
                finally:
                    self._stop.uninstall()
        finally:
            await fleet.close()

    def scale_inference(self, num_engines: int) -> None:
        """Have this many engines from now on; only from the run's own event loop. ConfigError outside the limits."""
        if self._loop is None:
            raise EngineError("the run has no engines yet that could be scaled")
        self._loop.supervisor.scale_inference(num_engines)

    def request_stop(self) -> None:
        """Ask for a graceful stop; only from the run's own event loop."""
        if self._stop is not None:
            self._stop.request("stop() was called")
