"""`SupervisedRun`: a run on given answers, through the same workers, batches and folders as reinforcement learning.

    prompt stream --prompts--> encoding worker --record batch (reference)--> train workers

The next batch is encoded while the current one is trained on; examples are accounted for once they are trained on, so
that a checkpoint never runs ahead of the weights in it. What differs between the kinds of runs is a `Task`.
"""

import asyncio
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from rayrl.checkpoint.store import Checkpoint
from rayrl.config.digest import digest_of
from rayrl.config.supervised import SupervisedRunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.driver.assembly import resolved_yaml
from rayrl.driver.fleet import Fleet, start_supervised_fleet
from rayrl.driver.joining import joined_cluster
from rayrl.driver.result import RunResult
from rayrl.driver.resume import Resume, find_checkpoint, set_damaged_aside
from rayrl.driver.run_failure import keeping_failure, marking_start
from rayrl.driver.stop_signal import StopSignal
from rayrl.driver.supervised_checkpointer import SupervisedCheckpointer, SupervisedProgress
from rayrl.errors import BudgetExhausted
from rayrl.infra.placement_plan import plan_sft_placement
from rayrl.tracking.metrics import Tracker
from rayrl.tracking.registry import make_tracker
from rayrl.tracking.run_folder import RunFolder
from rayrl.training.settings import TrainWorkerSettings
from rayrl.training.step import TrainStepResult
from rayrl.types.prompt import Prompt
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.supervised")


class Task(Protocol):
    """One kind of run on given answers."""

    @property
    def step_method(self) -> str:
        """Method of the training worker that makes one step on a batch."""
        ...

    def check(self) -> list[str]:
        """Return one line for each thing that was checked. ConfigError for the first that is wrong."""
        ...

    def settings(self, common: TrainWorkerSettings) -> TrainWorkerSettings:
        """Return the settings of the training workers, given those that all kinds share."""
        ...

    def encode(self, fleet: Fleet, prompts: list[Prompt]) -> Any:
        """Return a reference to the record batch of some prompts."""
        ...

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation follows `step`, which is 0 before the first."""
        ...

    async def evaluate(self, fleet: Fleet) -> dict[str, float]:
        """Return held-out metrics of the weights at this moment; empty for a task without held-out data."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Examples that are being encoded."""

    prompts: list[Prompt]
    reference: Any


@dataclass(slots=True, kw_only=True)
class _Course:
    """The parts of a running run."""

    fleet: Fleet
    tracker: Tracker
    stream: PromptStream
    checkpointer: SupervisedCheckpointer
    progress: SupervisedProgress
    metrics: dict[str, float]
    """Of the last step of this process."""


class SupervisedRun:
    """One run; the result is exported as a model folder below `<run_dir>/export`."""

    def __init__(self, config: SupervisedRunConfig, task: Task, resume: Resume = "never") -> None:
        """`resume` as in `Run`."""
        self._config = config
        self._task = task
        self._resume = resume

    def train(self) -> RunResult:
        """Run to the end in this thread. Errors as in `Run.train`."""
        return asyncio.run(self._main())

    async def _main(self) -> RunResult:
        config = self._config
        for note in self._task.check():
            _LOGGER.info("%s", note)
        text = resolved_yaml(config)
        folder = RunFolder.create(config.run_dir, text, digest_of(text), sys.argv, resume=self._resume != "never")
        with folder, keeping_failure(folder):
            point = await asyncio.to_thread(find_checkpoint, folder, config, self._resume)
            folder.accept_resume()
            await asyncio.to_thread(set_damaged_aside, folder, point)
            return await self._in_cluster(folder, point.checkpoint)

    async def _in_cluster(self, folder: RunFolder, checkpoint: Checkpoint | None) -> RunResult:
        config = self._config
        stop = StopSignal()
        async with joined_cluster(plan_sft_placement(config).total.get("CPU", 0.0), stop):
            tracker = make_tracker(config.tracking, folder, config.loop.num_steps)
            try:
                fleet = await start_supervised_fleet(config, self._task.settings)
                try:
                    course = self._course(fleet, folder, tracker)
                    if checkpoint is not None:
                        course.progress = await course.checkpointer.restore(checkpoint)
                    return await self._train(course, folder, stop)
                finally:
                    await fleet.close()
            finally:
                tracker.close()

    def _course(self, fleet: Fleet, folder: RunFolder, tracker: Tracker) -> _Course:
        config, dataset = self._config, self._config.dataset
        stream = PromptStream(
            load_source(dataset), seed=config.run.seed, shuffle=dataset.shuffle, max_epochs=dataset.epochs
        )
        checkpointer = SupervisedCheckpointer(
            config=config,
            folder=folder,
            config_digest=digest_of(resolved_yaml(config)),
            fleet=fleet,
            stream=stream,
        )
        return _Course(
            fleet=fleet,
            tracker=tracker,
            stream=stream,
            checkpointer=checkpointer,
            progress=SupervisedProgress(),
            metrics={},
        )

    async def _train(self, course: _Course, folder: RunFolder, stop: StopSignal) -> RunResult:
        loop, progress = self._config.loop, course.progress
        stop.begin()
        if progress.before is None:
            progress.before = await self._task.evaluate(course.fleet)
            self._log(course.tracker, 0, dict(progress.before))
        try:
            await self._steps(course, stop)
        finally:
            stop.uninstall()
        if self._config.checkpoint.export_hf:
            _LOGGER.info("writing the model folder %s", folder.export)
            await course.fleet.train.call_all(
                "export_hf", str(folder.export), seconds=loop.deadlines.checkpoint_s, phase="export of the model folder"
            )
        metrics = {**course.metrics, **{f"{name}_before": value for name, value in progress.before.items()}}
        if progress.first_loss is not None:
            metrics["loss/first"] = progress.first_loss
        if "loss/total" in course.metrics:
            metrics["loss/last"] = course.metrics["loss/total"]
        return RunResult(
            status="stopped" if progress.step < loop.num_steps else "done",
            steps=progress.step,
            metrics=metrics,
            run_dir=folder.path,
        )

    async def _steps(self, course: _Course, stop: StopSignal) -> None:
        """Train from where the run is to its end, or to a stop."""
        num_steps, progress = self._config.loop.num_steps, course.progress
        following = self._encode(course) if progress.step < num_steps else None
        while following is not None:
            batch, step = following, progress.step + 1
            following = self._encode(course) if step < num_steps else None
            start = time.monotonic()
            result = await self._step(course.fleet, step, batch.reference)
            metrics = {**result.metrics, "time/step_s": time.monotonic() - start}
            for prompt in batch.prompts:
                course.stream.account(prompt.id)
            progress.step = step
            if progress.first_loss is None:
                progress.first_loss = metrics["loss/total"]
            is_last = stop.reason is not None or step == num_steps
            if is_last or self._task.is_due(step):
                held_out = await self._task.evaluate(course.fleet)
                course.checkpointer.note_evaluation(step, held_out)
                metrics |= held_out
            course.metrics = metrics | await course.checkpointer.save_if_due(progress, is_last=is_last)
            course.tracker.log(step, course.metrics)
            if is_last:
                return

    def _log(self, tracker: Tracker, step: int, metrics: dict[str, float]) -> None:
        if metrics:
            tracker.log(step, metrics)

    def _encode(self, course: _Course) -> _Batch:
        """Return the next examples; a failure to encode them shows where the training workers take them."""
        prompts = [course.stream.next_prompt() for _ in range(self._config.loop.batch_size)]
        return _Batch(prompts=prompts, reference=self._task.encode(course.fleet, prompts))

    async def _step(self, fleet: Fleet, step: int, batch: Any) -> TrainStepResult:
        seconds = self._config.loop.deadlines.step_s
        with marking_start() if step > 1 else nullcontext():
            results = await fleet.train.call_all(
                self._task.step_method, step, batch, seconds=seconds, phase=f"supervised step {step}"
            )
        result: TrainStepResult = results[0]
        if result.skipped:
            raise BudgetExhausted(f"step {step} has no finite loss or gradient ({result.reason}); lower the lr")
        return result
