"""Write one checkpoint: what training must wait for, and what it need not.

    copy     the store makes a folder; every rank copies its state                   training waits
    finish   ranks write the copies in threads of their own, a rollout worker        training goes on
             writes the buffered groups; then the store commits

Both are bounded by deadlines.checkpoint_s. A rank that trains answers only between two steps, so that a checkpoint is
complete at the latest when the step that was running then has ended.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.manifest import read_manifest
from rayrl.checkpoint.mirror import CheckpointMirror
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import CheckpointStore, PendingCheckpoint
from rayrl.config.driver import DeadlineConfig
from rayrl.driver.group_buffer import BufferedGroup
from rayrl.errors import DeadlineExceeded
from rayrl.infra.actor_group import ActorGroup
from rayrl.infra.waiting import wait_for

TRAIN_FOLDER = "train"
GROUPS_FILE = "groups.arrow"
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_DISK = "the file system of the checkpoints"


class CheckpointWriter:
    """Has all processes write their part, then makes it visible."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        train: ActorGroup,
        workers: ActorGroup,
        deadlines: DeadlineConfig,
        ledger: Ledger | None = None,
    ) -> None:
        """`ledger`: of runs that have one."""
        self._store = store
        self._ledger = ledger
        self._train = train
        self._workers = workers
        self._deadlines = deadlines

    async def copy(self, step: int) -> PendingCheckpoint:
        """Make the folder and have every rank copy its state. Nothing is left of it where that fails."""
        seconds, phase = self._deadlines.checkpoint_s, f"checkpoint of step {step}"
        pending = await wait_for(
            asyncio.to_thread(self._store.begin, step), seconds=seconds, phase=phase, actor=_DISK, what="a new folder"
        )
        try:
            await self._train.call_all("begin_save", str(pending.path / TRAIN_FOLDER), seconds=seconds, phase=phase)
        except BaseException:
            self._store.abandon(pending)
            raise
        return pending

    async def finish(self, pending: PendingCheckpoint, state: RunState, groups: Sequence[BufferedGroup]) -> Path:
        """Return the folder of the complete checkpoint. Nothing is left of it where that fails."""
        seconds, phase = self._deadlines.checkpoint_s, f"checkpoint of step {state.step}"
        try:
            await self._workers.call_any(
                "write_groups",
                str(pending.path / GROUPS_FILE),
                *(group.batch for group in groups),
                seconds=seconds,
                phase=phase,
            )
            await self._until_written(phase)
            if self._ledger is not None:
                # What the checkpoint counts as done must survive whatever the checkpoint survives.
                syncing = asyncio.to_thread(self._ledger.sync)
                await wait_for(syncing, seconds=seconds, phase=phase, actor=_DISK, what="the ledger on the disk")
            committing = asyncio.to_thread(self._store.commit, pending, state, (GROUPS_FILE,))
            path: Path = await wait_for(committing, seconds=seconds, phase=phase, actor=_DISK, what="the commit")
        except BaseException:
            self._store.abandon(pending)
            raise
        return path

    async def copy_away(self, path: Path, url: str) -> None:
        """Copy a complete checkpoint to another file system, and remove there what the store has removed."""
        phase = f"copy of checkpoint {path.name} to {url}"
        copying = asyncio.to_thread(self._copy_away, path, url)
        await wait_for(copying, seconds=self._deadlines.checkpoint_s, phase=phase, actor=url, what="the copy")

    def _copy_away(self, path: Path, url: str) -> None:
        mirror = CheckpointMirror(url)
        mirror.upload(path, read_manifest(path))
        mirror.keep_only([item.path.name for item in self._store.complete()])

    async def _until_written(self, phase: str) -> None:
        start = time.monotonic()
        pause = _FIRST_PAUSE_S
        while not all(
            await self._train.call_all(
                "save_ended", seconds=self._deadlines.step_s + self._deadlines.checkpoint_s, phase=phase
            )
        ):
            if time.monotonic() - start > self._deadlines.checkpoint_s:
                raise DeadlineExceeded(
                    f"{phase}: the training state was not written after deadlines.checkpoint_s="
                    f"{self._deadlines.checkpoint_s}; raise it, or write to faster storage"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
