"""Save and restore a run: `checkpoint` decides and stores, this acts.

Order of a save: every rank writes its state, a rollout worker writes the buffered groups, then the store commits, which
makes the checkpoint visible. The run's counts and the prompt stream are read before the first wait, in one go: groups
that arrive while the files are written are not in the checkpoint, and are sampled again after a resume.
"""

import asyncio
from pathlib import Path
from typing import Any

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import Checkpoint, CheckpointStore
from rayrl.config.run import RunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.driver.group_buffer import BufferedGroup, GroupBuffer
from rayrl.driver.progress import Progress
from rayrl.infra.actor_group import ActorGroup
from rayrl.infra.waiting import wait_for
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.checkpointer")
TRAIN_FOLDER = "train"
GROUPS_FILE = "groups.arrow"


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
        self._saved_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint follows `step`."""
        every = self._config.checkpoint.every
        return every > 0 and step % every == 0

    async def save(self) -> Path | None:
        """Write a checkpoint of this moment; None if this step is saved already. CheckpointError if it cannot be."""
        if self._saved_step == self._progress.step:
            return None
        groups = self._buffer.in_order()
        state = RunState(
            step=self._progress.step,
            version=self._progress.version,
            consumed=self._progress.consumed,
            dataset_state=self._stream.state(),
            buffered=len(groups),
            ledger_position=self._ledger.position,
            config_digest=self._config_digest,
            run_id=self._run_id,
            extra={"ledger_head": self._ledger.head},
        )
        seconds = self._config.driver.deadlines.checkpoint_s
        phase = f"checkpoint of step {state.step}"
        pending = await asyncio.to_thread(self._store.begin, state.step)
        try:
            await self._train.call_all("save", str(pending.path / TRAIN_FOLDER), seconds=seconds, phase=phase)
            await self._workers.call(
                0,
                "write_groups",
                str(pending.path / GROUPS_FILE),
                *(group.batch for group in groups),
                seconds=seconds,
                phase=phase,
            )
        except BaseException:
            self._store.abandon(pending)
            raise
        path = await asyncio.to_thread(self._store.commit, pending, state, (GROUPS_FILE,))
        self._saved_step = state.step
        _LOGGER.info("checkpoint of step %d: %s", state.step, path)
        return path

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Put the run back to where `checkpoint` was written; weights still have to be published."""
        state = checkpoint.load_state()
        seconds = self._config.driver.deadlines.checkpoint_s
        phase = f"restore of step {state.step}"
        await self._train.call_all("load", str(checkpoint.path / TRAIN_FOLDER), seconds=seconds, phase=phase)
        groups = await self._read_groups(checkpoint.path / GROUPS_FILE, state.buffered, seconds, phase)
        self._stream.restore(state.dataset_state, held=[group.summary.prompt_id for group in groups])
        for group in groups:
            self._buffer.put(group)
        self._ledger.rewind_to(state.step, min_position=state.ledger_position)
        # Buffered groups hold their slots again: without them capacity would be too large after a resume.
        self._progress.step = state.step
        self._progress.version = state.version
        self._progress.consumed = state.consumed
        self._progress.outstanding = len(groups)
        self._saved_step = state.step

    async def _read_groups(self, path: Path, count: int, seconds: float, phase: str) -> list[BufferedGroup]:
        if count == 0:
            return []
        member = self._workers.members[0]
        references: list[Any] = member.handle.read_groups.options(num_returns=2 * count).remote(str(path))
        groups = []
        for index in range(count):
            summary = await wait_for(references[index], seconds=seconds, phase=phase, actor=member.label)
            ticket = self._buffer.new_ticket()
            groups.append(BufferedGroup(ticket=ticket, summary=summary, batch=references[count + index]))
        return groups
