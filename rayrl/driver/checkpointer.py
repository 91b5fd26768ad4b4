"""Save and restore a run: `checkpoint` decides and stores, this acts.

    save        counts, prompt stream and buffer are read in one go; training waits for the copy of its state only
    (task)      the copy is written and committed while training goes on; at most one such task
    save_now    waits for that task, saves what it has not, and waits for the commit

Groups that arrive while the files are written are not in the checkpoint, and are sampled again after a resume. A save
that falls due while the last one is still being written is put off to the end of the next step, so that memory is
bounded by one copy. What a save fails with ends the run or is counted, as `checkpoint.on_error` says; the older
checkpoints are intact either way.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import CHECKPOINT_FAILED
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import Checkpoint, CheckpointStore, PendingCheckpoint
from rayrl.config.run import RunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.driver.checkpoint_writer import GROUPS_FILE, TRAIN_FOLDER, CheckpointWriter
from rayrl.driver.group_buffer import BufferedGroup, GroupBuffer
from rayrl.driver.kl_coef import STATE_KEY, first_kl_coef, restored_kl_coef
from rayrl.driver.progress import Progress
from rayrl.errors import ActorDied, CheckpointError, RayrlError
from rayrl.infra.actor_group import ActorGroup, Member
from rayrl.infra.waiting import wait_for
from rayrl.models.fingerprint import model_fingerprint
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.checkpointer")


class Checkpointer:
    """Writes checkpoints of a running run, and reads one back."""

    def __init__(
        self,
        *,
        config: RunConfig,
        store: CheckpointStore,
        run_id: str,
        config_digest: str,
        train: ActorGroup,
        workers: ActorGroup,
        buffer: GroupBuffer,
        stream: PromptStream,
        progress: Progress,
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._store = store
        self._run_id = run_id
        self._config_digest = config_digest
        self._train = train
        self._workers = workers
        self._buffer = buffer
        self._stream = stream
        self._progress = progress
        self._ledger = ledger
        self._writer = CheckpointWriter(
            store=store, ledger=ledger, train=train, workers=workers, deadlines=config.driver.deadlines
        )
        self._task: asyncio.Task[None] | None = None
        self._pending: PendingCheckpoint | None = None
        self._newest: Path | None = None
        self._first_stream_state = stream.state()
        self._model = model_fingerprint(config.model.path)
        self._is_put_off = False
        self._copy_s = 0.0
        self._write_s = 0.0
        self._num_written = 0
        self._num_failed = 0
        self.saved_step: int | None = None
        """Step of the newest complete checkpoint of this run; None before the first."""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint follows `step`: by the config, or since one was put off."""
        every = self._config.checkpoint.every
        is_due = self._is_put_off or (every > 0 and step % every == 0)
        self._is_put_off = is_due and self._is_writing
        if self._is_put_off:
            _LOGGER.warning("the checkpoint of step %d is put off: the last one is still being written", step)
        return is_due and not self._is_put_off

    async def save(self) -> None:
        """Begin a checkpoint of this moment, and return once training may go on.

        Raises what it, or the one before, failed with, if `checkpoint.on_error` is `stop`.
        """
        await self.finish_writing()
        if self.saved_step == self._progress.step:
            return
        groups = self._buffer.in_order()
        state = self._state(len(groups))
        start = time.monotonic()
        try:
            self._pending = pending = await self._writer.copy(state.step)
        except RayrlError as error:
            self._fail(state.step, error)
            return
        self._copy_s = time.monotonic() - start
        self._task = asyncio.get_running_loop().create_task(self._finish(pending, state, groups))
        if not self._config.checkpoint.background:
            await self.finish_writing()

    async def save_now(self) -> None:
        """Write a checkpoint of this moment, unless there is one, and return once it is complete. Raises as `save`."""
        await self.save()
        await self.finish_writing()

    async def note_ended(self) -> None:
        """Deal with a save that has ended meanwhile; waits for none. To be called between steps. Raises as `save`."""
        if self._task is not None and self._task.done():
            await self.finish_writing()

    async def finish_writing(self) -> None:
        """Wait for the save that is under way, if there is one. Raises as `save`."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            await task
        except RayrlError as error:
            self._fail(self._progress.step, error)

    async def close(self) -> None:
        """Give up a save that is under way; nothing is left of it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._pending is not None:
            # A task that was cancelled before its first line has not done it.
            self._store.abandon(self._pending)
            self._pending = None

    def note_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Use an evaluation for `checkpoint.keep_best`, if it ran on one version only."""
        metric = self._config.checkpoint.keep_best
        if metric is not None and metric in metrics and metrics["eval/other_version_share"] == 0:
            self._store.record_score(int(metrics["eval/version"]), metrics[metric])

    def metrics(self) -> dict[str, float]:
        """Return counts since the start, and the times of the last save."""
        return {
            "checkpoint/written": float(self._num_written),
            "checkpoint/failed": float(self._num_failed),
            "time/checkpoint_copy_s": self._copy_s,
            "time/checkpoint_write_s": self._write_s,
        }

    async def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint of this run, read and proven; None before the first.

        Not simply the last one in the store: after a resume from an older checkpoint that is of another course.
        """
        if self._newest is None:
            return None
        seconds = self._config.driver.deadlines.checkpoint_s
        opening = asyncio.to_thread(self._store.open, self._newest, self._run_id)
        phase = f"opening checkpoint {self._newest}"
        checkpoint: Checkpoint = await wait_for(opening, seconds=seconds, phase=phase, actor="the file system")
        return checkpoint

    async def restore_or_restart(self, checkpoint: Checkpoint | None, *, held: Sequence[BufferedGroup] = ()) -> None:
        """As `restore`; without a checkpoint the run is put back to its beginning, with a fresh training group."""
        if checkpoint is not None:
            await self.restore(checkpoint, held=held)
            return
        self._stream.restore(self._first_stream_state, held=[group.summary.prompt_id for group in held])
        self._ledger.rewind_to(0, min_position=0)
        self._progress.restore(step=0, version=0, consumed=0, outstanding=len(held))
        self._progress.kl_coef = first_kl_coef(self._config.algorithm.kl)
        self._store.forget_scores()
        self.saved_step, self._is_put_off = None, False

    async def restore(self, checkpoint: Checkpoint, *, held: Sequence[BufferedGroup] = ()) -> None:
        """Put the run back to where `checkpoint` was written; weights still have to be published.

        `held` are groups that are in the buffer and stay there; those of the checkpoint with the same prompts do not
        come back.
        """
        state = checkpoint.load_state()
        if state.extra.get("model", self._model) != self._model:
            raise CheckpointError(
                f"the model folder {self._config.model.path} is not what it was when {checkpoint.path} was written: "
                "tokenizer or reference policy may differ; put it back, or start a new run from the exported weights"
            )
        seconds = self._config.driver.deadlines.checkpoint_s
        phase = f"restore of step {state.step}"
        await self._train.call_all("load", str(checkpoint.path / TRAIN_FOLDER), seconds=seconds, phase=phase)
        saved = await self._read_groups(checkpoint.path / GROUPS_FILE, state.buffered, seconds, phase)
        known = {group.summary.prompt_id for group in held}
        added = [group for group in saved if group.summary.prompt_id not in known]
        self._stream.restore(state.dataset_state, held=[group.summary.prompt_id for group in (*held, *added)])
        for group in added:
            self._buffer.put(group)
        self._ledger.rewind_to(state.step, min_position=state.ledger_position)
        # Buffered groups hold their slots again: without them capacity would be too large after a resume.
        self._progress.restore(
            step=state.step, version=state.version, consumed=state.consumed, outstanding=len(held) + len(added)
        )
        self._progress.kl_coef = restored_kl_coef(self._config.algorithm.kl, state.extra)
        self._store.forget_scores()
        self._newest, self.saved_step, self._is_put_off = checkpoint.path, state.step, False

    @property
    def _is_writing(self) -> bool:
        return self._task is not None and not self._task.done()

    def _state(self, num_buffered: int) -> RunState:
        return RunState(
            step=self._progress.step,
            version=self._progress.version,
            consumed=self._progress.consumed,
            dataset_state=self._stream.state(),
            buffered=num_buffered,
            ledger_position=self._ledger.position,
            config_digest=self._config_digest,
            run_id=self._run_id,
            extra={"ledger_head": self._ledger.head, "model": self._model, STATE_KEY: self._progress.kl_coef},
        )

    async def _finish(self, pending: PendingCheckpoint, state: RunState, groups: Sequence[BufferedGroup]) -> None:
        start = time.monotonic()
        path = await self._writer.finish(pending, state, groups)
        self._pending = None
        self._write_s = time.monotonic() - start
        self._num_written += 1
        self._newest, self.saved_step = path, state.step
        _LOGGER.info("checkpoint of step %d: %s", state.step, path)
        if self._config.checkpoint.copy_to is not None:
            await self._writer.copy_away(path, self._config.checkpoint.copy_to)

    def _fail(self, step: int, error: RayrlError) -> None:
        self._num_failed += 1
        self._ledger.record_event(CHECKPOINT_FAILED, step=step, detail={"error": str(error).splitlines()[0]})
        if self._config.checkpoint.on_error == "stop":
            raise error
        _LOGGER.error("a checkpoint could not be written, the run goes on (checkpoint.on_error: continue): %s", error)

    async def _read_groups(self, path: Path, count: int, seconds: float, phase: str) -> list[BufferedGroup]:
        if count == 0:
            return []
        *others, last = self._workers.members
        for member in others:
            try:
                return await self._read_with(member, path, count, seconds, phase)
            except ActorDied as error:
                # Nobody supervises yet when a run begins; the worker is missed and replaced later.
                _LOGGER.warning("another worker reads the buffered groups: %s", error)
        return await self._read_with(last, path, count, seconds, phase)

    async def _read_with(
        self, member: Member, path: Path, count: int, seconds: float, phase: str
    ) -> list[BufferedGroup]:
        references: list[Any] = member.handle.read_groups.options(num_returns=2 * count).remote(str(path))
        summaries = [
            await wait_for(reference, seconds=seconds, phase=phase, actor=member.label)
            for reference in references[:count]
        ]
        return [
            BufferedGroup(ticket=self._buffer.new_ticket(), summary=summary, batch=batch, node=member.node)
            for summary, batch in zip(summaries, references[count:], strict=True)
        ]
