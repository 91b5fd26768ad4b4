"""Checkpoints of a run on given answers: weights, moments, schedule, the place in the data, and what the run began at.

The same store, manifest and writer as those of reinforcement learning, with no group in the buffer. Training waits for
each, as a step is short and nothing else could go on.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayrl.checkpoint.retention import RetentionRule
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import Checkpoint, CheckpointStore
from rayrl.config.supervised import SupervisedRunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.driver.checkpoint_writer import TRAIN_FOLDER, CheckpointWriter
from rayrl.driver.fleet import Fleet
from rayrl.errors import CheckpointError, RayrlError
from rayrl.models.fingerprint import model_fingerprint
from rayrl.tracking.run_folder import RunFolder
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.checkpointer")


@dataclass(slots=True, kw_only=True)
class SupervisedProgress:
    """How far a run is, and what its summary compares the end with."""

    step: int = 0
    """Optimizer steps done."""
    before: Mapping[str, float] | None = None
    """Held-out metrics before the first step; None until they are measured."""
    first_loss: float | None = None
    """Loss of the first step."""


class SupervisedCheckpointer:
    """Writes checkpoints of a running run, and reads one back."""

    def __init__(
        self,
        *,
        config: SupervisedRunConfig,
        folder: RunFolder,
        config_digest: str,
        fleet: Fleet,
        stream: PromptStream,
    ) -> None:
        """`stream` must have accounted for the examples of every step that is done, and for no others."""
        self._config = config
        self._run_id = folder.run_id
        self._config_digest = config_digest
        self._train = fleet.train
        self._stream = stream
        self._store = CheckpointStore(folder.checkpoints, rule=RetentionRule.of(config.checkpoint))
        self._writer = CheckpointWriter(
            store=self._store, train=fleet.train, workers=fleet.rollout, deadlines=config.loop.deadlines
        )
        self._model = model_fingerprint(config.model.path)
        self._saved_step: int | None = None

    async def restore(self, checkpoint: Checkpoint) -> SupervisedProgress:
        """Put weights, moments and data back to where `checkpoint` was written. CheckpointError if it does not fit."""
        state = checkpoint.load_state()
        if state.extra.get("model") != self._model:
            raise CheckpointError(
                f"the model folder {self._config.model.path} is not what it was when {checkpoint.path} was written: "
                "tokenizer or reference policy may differ; put it back, or start a new run from the exported weights"
            )
        await self._train.call_all(
            "load",
            str(checkpoint.path / TRAIN_FOLDER),
            seconds=self._config.loop.deadlines.checkpoint_s,
            phase=f"restore of step {state.step}",
        )
        self._stream.restore(state.dataset_state)
        self._saved_step = state.step
        return SupervisedProgress(step=state.step, before=state.extra["before"], first_loss=state.extra["first_loss"])

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Use held-out metrics of the weights after `step` for `checkpoint.keep_best`."""
        metric = self._config.checkpoint.keep_best
        if metric is not None and metric in metrics:
            self._store.record_score(step, metrics[metric])

    async def save_if_due(self, progress: SupervisedProgress, *, is_last: bool) -> dict[str, float]:
        """Write a checkpoint of this moment where the config asks for one; return its metrics, empty without one.

        What it fails with is raised, or told and counted, as `checkpoint.on_error` says.
        """
        options = self._config.checkpoint
        is_due = options.every > 0 and progress.step % options.every == 0
        if self._saved_step == progress.step or not (is_due or (is_last and options.at_end)):
            return {}
        start = time.monotonic()
        try:
            await self._save(progress)
        except RayrlError as error:
            if options.on_error == "stop":
                raise
            _LOGGER.error(
                "a checkpoint could not be written, the run goes on (checkpoint.on_error: continue): %s", error
            )
            return {"checkpoint/failed": 1.0}
        return {"time/checkpoint_s": time.monotonic() - start}

    async def _save(self, progress: SupervisedProgress) -> None:
        pending = await self._writer.copy(progress.step)
        path = await self._writer.finish(pending, self._state(progress), [])
        self._saved_step = progress.step
        _LOGGER.info("checkpoint of step %d: %s", progress.step, path)
        if self._config.checkpoint.copy_to is not None:
            await self._writer.copy_away(path, self._config.checkpoint.copy_to)

    def _state(self, progress: SupervisedProgress) -> RunState:
        extra: dict[str, Any] = {
            "model": self._model,
            "before": dict(progress.before or {}),
            "first_loss": progress.first_loss,
        }
        return RunState(
            step=progress.step,
            version=progress.step,
            consumed=progress.step * self._config.loop.batch_size,
            dataset_state=self._stream.state(),
            buffered=0,
            ledger_position=0,
            config_digest=self._config_digest,
            run_id=self._run_id,
            extra=extra,
        )
