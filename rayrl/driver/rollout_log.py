"""Write consumed trajectories to disk without stopping the train loop: one write behind, its failure is a warning."""

import asyncio
from pathlib import Path
from typing import Any

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import ROLLOUT_LOG_LOST
from rayrl.errors import RayrlError
from rayrl.infra.actor_group import ActorGroup
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.rollout_log")

_CLOSE_S = 5.0


class RolloutLog:
    """Has a rollout worker write the record batches of each step; the driver only passes references."""

    def __init__(
        self, *, folder: Path, workers: ActorGroup, is_enabled: bool, deadline_s: float, ledger: Ledger
    ) -> None:
        self._folder = folder
        self._workers = workers
        self._is_enabled = is_enabled
        self._deadline_s = deadline_s
        self._ledger = ledger
        self._step = 0
        self._pending: asyncio.Task[Any] | None = None

    async def write(self, step: int, batches: list[Any]) -> None:
        """Start writing a step; waits for the write of the step before."""
        if self._is_enabled:
            await self.finish()
        if not self._is_enabled:
            return
        self._step = step
        path = self._folder / f"step_{step:06d}.parquet"
        self._pending = asyncio.get_running_loop().create_task(
            self._workers.call_any(
                "write_rollouts", str(path), *batches, seconds=self._deadline_s, phase=f"rollout log of step {step}"
            )
        )

    async def close(self) -> None:
        """Give a write that is under way little time: the run has failed, or `finish` came before."""
        if self._pending is not None:
            # The audit of a failed run would miss a file that is there a moment later.
            await asyncio.wait({self._pending}, timeout=min(_CLOSE_S, self._deadline_s))
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
            self._pending = None

    async def finish(self) -> None:
        """Wait for the last write. A failed one is told and switches the log off: it must not end a run."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            await pending
        except RayrlError as error:
            self._is_enabled = False
            _LOGGER.warning("the rollout log is switched off, its last write failed: %s", error)
            # An audit must be able to tell a file that was never written from one that was taken away.
            self._ledger.record_event(ROLLOUT_LOG_LOST, self._step, {"error": " ".join(str(error).split())[:300]})
