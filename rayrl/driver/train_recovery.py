"""Bring a run back after a training worker was lost, while engines and rollout workers stay up.

    hold ─> new training group ─> load ─> rewind ─> publish ─> go on
    │       │                     │       │         └ engines are set back to the checkpoint's version
    │       │                     │       └ prompt stream, ledger, counts: the steps since the checkpoint are undone
    │       │                     └ the newest checkpoint of this run, or the initial model
    │       └ all ranks anew: the others hold half a step, and a process group without one of its members
    └ no group is admitted, those in flight are cancelled, until the engines have the restored version

What becomes of groups: one in flight is sampled again. A finished one stays if all its tokens are of versions up to
the checkpoint's; else the weights that sampled it no longer exist, the version numbers will be given to others, and it
is sampled again. Both are counted. The publisher's lock is held over all of it: no engine is given weights meanwhile.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import TRAINING_REBUILT
from rayrl.config.run import RunConfig
from rayrl.driver.checkpointer import Checkpointer
from rayrl.driver.evaluator import Evaluator
from rayrl.driver.failure_policy import Decision, FaultCause, RestartHistory, RestartLimits, decide
from rayrl.driver.fleet import Fleet, start_training_group
from rayrl.driver.group_buffer import BufferedGroup, GroupBuffer
from rayrl.driver.progress import Progress, ProgressSnapshot
from rayrl.driver.publisher import Publisher
from rayrl.driver.rollout_loop import RolloutLoop
from rayrl.errors import ActorDied, ActorError, BudgetExhausted, DeadlineExceeded, RayrlError
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.recovery")
_PROBE_S = 10.0
"""For a rank to say that it is there, once a call to the group has failed; a broken collective ends well before."""
_CLOSE_S = 1.0


class GroupHealth(Enum):
    """What the training group answers after a call to it, or one that needed it, has failed."""

    ALIVE = "every rank answers"
    SILENT = "a rank does not answer"
    DEAD = "a rank's process is gone"


def is_training_fault(error: RayrlError, health: GroupHealth) -> bool:
    """Return whether only a new training group can go on after `error`.

    A rank that is gone explains every error. Where all answer, an actor that failed with an error that is not one of
    rayrl's means a broken collective. A silent rank after an expired deadline is slow or hangs: starting anew would
    only be slow or hang again, so the deadline is told.
    """
    if health is GroupHealth.DEAD:
        return True
    if health is GroupHealth.SILENT:
        return not isinstance(error, DeadlineExceeded)
    return isinstance(error, ActorError) and not isinstance(error, ActorDied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What becomes of finished groups when the weights go back to an earlier version."""

    kept: tuple[BufferedGroup, ...]
    """Sampled by versions that still exist; they keep their slots."""
    lost: tuple[BufferedGroup, ...]
    """Sampled, in part at least, by versions that do not; their prompts are sampled again."""


def sort_out(groups: Sequence[BufferedGroup], version: int) -> Remains:
    """Return which groups survive a return to `version`."""
    kept = tuple(
        group for group in groups if group.summary.newest_version is None or group.summary.newest_version <= version
    )
    return Remains(kept=kept, lost=tuple(group for group in groups if group not in kept))


class TrainRecovery:
    """Rebuilds the training group of a run, within `supervision.restarts`."""

    def __init__(
        self,
        *,
        config: RunConfig,
        fleet: Fleet,
        publisher: Publisher,
        checkpointer: Checkpointer,
        evaluator: Evaluator,
        rollout_loop: RolloutLoop,
        buffer: GroupBuffer,
        progress: Progress,
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._publisher = publisher
        self._checkpointer = checkpointer
        self._evaluator = evaluator
        self._rollout_loop = rollout_loop
        self._buffer = buffer
        self._progress = progress
        self._ledger = ledger
        self._history = RestartHistory()
        self._num_rebuilt = 0
        self._num_lost = 0
        self._num_undone = 0

    async def recover(self, error: RayrlError, taken: Sequence[BufferedGroup]) -> None:
        """Return once the run can go on from the newest checkpoint.

        Raises `error` itself if a new training group would not help, and BudgetExhausted after too many.

        Args:
            error: what a training step, its publication or its checkpoint failed with.
            taken: the groups of that step; they are out of the buffer and hold their slots.
        """
        before, pending = self._progress.snapshot(), list(taken)
        async with self._publisher.lock:
            while True:
                await self._pause(error)
                try:
                    await self._rebuild(error, before, pending)
                except RayrlError as next_error:
                    # A rank of the new group may die on its way, too; what was done so far is done again.
                    error = next_error
                else:
                    return

    async def renew(self, error: RayrlError) -> None:
        """Return once there is a new training group, with nothing loaded; for a run that has not begun yet.

        Raises as `recover`.
        """
        async with self._publisher.lock:
            await self._pause(error)
            await self._renew_group()

    def metrics(self) -> dict[str, float]:
        """Return counts since the start."""
        return {
            "supervision/train_rebuilt": float(self._num_rebuilt),
            "supervision/train_steps_undone": float(self._num_undone),
            "supervision/train_groups_lost": float(self._num_lost),
        }

    async def _pause(self, error: RayrlError) -> None:
        """Return when a rebuild may begin; raise if there is to be none."""
        if not is_training_fault(error, await self._probe()):
            raise error
        await asyncio.sleep(self._rule(error))

    async def _probe(self) -> GroupHealth:
        try:
            await self._fleet.train.call_all("ready", seconds=_PROBE_S, phase="asking the training group")
        except ActorDied:
            return GroupHealth.DEAD
        except RayrlError:
            return GroupHealth.SILENT
        return GroupHealth.ALIVE

    def _rule(self, error: RayrlError) -> float:
        """Return the pause before the rebuild. BudgetExhausted if there were too many."""
        supervision, now = self._config.supervision, time.monotonic()
        ruling = decide(
            FaultCause.DIED,
            role="train",
            num_live=0,
            history=self._history,
            limits=RestartLimits(
                restarts=supervision.restarts,
                window_s=supervision.window_s,
                backoff_s=supervision.backoff_s,
                max_backoff_s=supervision.max_backoff_s,
                min_members=1,
            ),
            now=now,
        )
        if ruling.decision is not Decision.REPLACE:
            raise BudgetExhausted(f"the training group is lost: {ruling.reason}; {error}") from error
        _LOGGER.warning("the training group is lost and rebuilt, %s: %s", ruling.reason, error)
        self._history = self._history.add(now, supervision.window_s)
        return ruling.pause_s

    async def _rebuild(self, error: RayrlError, before: ProgressSnapshot, pending: list[BufferedGroup]) -> None:
        """`before`: the counts at the loss. `pending`: groups out of the buffer, emptied once they are in it."""
        start = time.monotonic()
        num_in_flight = await self._rollout_loop.hold()
        self._num_lost += num_in_flight
        # Both use what is about to go: an evaluation of a version that is undone, a save of ranks that are gone.
        await self._evaluator.close()
        await self._checkpointer.close()
        await self._renew_group()
        checkpoint = await self._checkpointer.newest()
        groups = sorted([*self._buffer.in_order(), *pending], key=lambda group: group.ticket)
        remains = sort_out(groups, 0 if checkpoint is None else checkpoint.version)
        self._buffer.replace(remains.kept)
        self._num_lost += len(remains.lost)
        pending.clear()
        await self._checkpointer.restore_or_restart(checkpoint, held=remains.kept)
        record = await self._publisher.publish(self._progress.version)
        self._ledger.record_publication(record.published, step=self._progress.step)
        self._num_rebuilt += 1
        self._num_undone += before.step - self._progress.step
        self._ledger.record_event(
            TRAINING_REBUILT,
            step=self._progress.step,
            detail={
                "error": str(error).splitlines()[0],
                "from_step": before.step,
                "from_version": before.version,
                "to_version": self._progress.version,
                "groups_in_flight": num_in_flight,
                "groups_kept": len(remains.kept),
                "groups_lost": [str(group.summary.prompt_id) for group in remains.lost],
                "seconds": time.monotonic() - start,
            },
        )
        self._rollout_loop.go_on()
        _LOGGER.warning(
            "training goes on after step %d with version %d (%.1f s); undone: %d steps; sampled again: %d groups in "
            "flight and %d of versions that are gone",
            self._progress.step,
            self._progress.version,
            time.monotonic() - start,
            before.step - self._progress.step,
            num_in_flight,
            len(remains.lost),
        )

    async def _renew_group(self) -> None:
        # First the old one: its resources are needed, and a rank that still computes must not reach a new group.
        await self._fleet.train.shutdown(_CLOSE_S)
        group = await start_training_group(self._config, self._fleet.reservation)
        self._fleet.train.take_over(group)
        self._publisher.renew_trainer(self._fleet.train)
