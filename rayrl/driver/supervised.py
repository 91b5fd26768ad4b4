"""`SupervisedRun`: a run on given answers, through the same workers, batches and folders as reinforcement learning.

    prompt stream --prompts--> encoding worker --record batch (reference)--> train workers

The next batch is encoded while the current one is trained on. What differs between the kinds of runs is a `Task`.
"""

import asyncio
import sys
import time
from contextlib import nullcontext
from typing import Any, Protocol

from rayrl.config.supervised import SupervisedRunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.driver.assembly import digest_of, resolved_yaml
from rayrl.driver.fleet import Fleet, start_supervised_fleet
from rayrl.driver.joining import joined_cluster
from rayrl.driver.result import RunResult
from rayrl.driver.run_failure import keeping_failure, marking_start
from rayrl.driver.stop_signal import StopSignal
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


class SupervisedRun:
    """One run; the result is exported as a model folder below `<run_dir>/export`."""

    def __init__(self, config: SupervisedRunConfig, task: Task) -> None:
        self._config = config
        self._task = task

    def train(self) -> RunResult:
        """Run to the end in this thread. Errors as in `Run.train`."""
        return asyncio.run(self._main())

    async def _main(self) -> RunResult:
        config = self._config
        for note in self._task.check():
            _LOGGER.info("%s", note)
        text = resolved_yaml(config)
        folder = RunFolder.create(config.run_dir, text, digest_of(text), sys.argv, resume=False)
        with folder, keeping_failure(folder):
            return await self._in_cluster(folder)

    async def _in_cluster(self, folder: RunFolder) -> RunResult:
        config = self._config
        stop = StopSignal()
        async with joined_cluster(plan_sft_placement(config).total.get("CPU", 0.0), stop):
            tracker = make_tracker(config.tracking, folder, config.loop.num_steps)
            try:
                fleet = await start_supervised_fleet(config, self._task.settings)
                try:
                    return await self._train(fleet, folder, tracker, stop)
                finally:
                    await fleet.close()
            finally:
                tracker.close()

    async def _train(self, fleet: Fleet, folder: RunFolder, tracker: Tracker, stop: StopSignal) -> RunResult:
        loop = self._config.loop
        dataset = self._config.dataset
        stream = PromptStream(
            load_source(dataset), seed=self._config.run.seed, shuffle=dataset.shuffle, max_epochs=dataset.epochs
        )
        stop.begin()
        losses: list[float] = []
        metrics: dict[str, float] = {}
        evaluations = [await self._task.evaluate(fleet)]
        self._log(tracker, 0, evaluations[0])
        try:
            batch = self._encode(fleet, stream)
            for step in range(1, loop.num_steps + 1):
                current = batch
                if step < loop.num_steps:
                    batch = self._encode(fleet, stream)
                start = time.monotonic()
                result = await self._step(fleet, step, current)
                metrics = {**result.metrics, "time/step_s": time.monotonic() - start}
                losses.append(metrics["loss/total"])
                is_last = stop.reason is not None or step == loop.num_steps
                if is_last or self._task.is_due(step):
                    evaluations.append(await self._task.evaluate(fleet))
                    metrics |= evaluations[-1]
                tracker.log(step, metrics)
                if is_last:
                    break
        finally:
            stop.uninstall()
        await fleet.train.call_all(
            "export_hf", str(folder.export), seconds=loop.deadlines.checkpoint_s, phase="export of the model folder"
        )
        before = {f"{name}_before": value for name, value in evaluations[0].items()}
        return RunResult(
            status="stopped" if len(losses) < loop.num_steps else "done",
            steps=len(losses),
            metrics={**metrics, **before, "loss/first": losses[0], "loss/last": losses[-1]},
            run_dir=folder.path,
        )

    def _log(self, tracker: Tracker, step: int, metrics: dict[str, float]) -> None:
        if metrics:
            tracker.log(step, metrics)

    def _encode(self, fleet: Fleet, stream: PromptStream) -> Any:
        """Return a reference to the next batch; a failure shows where the training workers take it."""
        prompts = [stream.next_prompt() for _ in range(self._config.loop.batch_size)]
        for prompt in prompts:
            stream.account(prompt.id)
        return self._task.encode(fleet, prompts)

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
