"""`SFTRun`: supervised fine-tuning on prompts with answers, through the same workers, batches and folders.

    prompt stream --prompts--> encoding worker --record batch (reference)--> train workers

The next batch is encoded while the current one is trained on.
"""

import asyncio
import sys
import time
from contextlib import nullcontext
from typing import Any

from rayrl.config.run import SFTRunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.driver.assembly import digest_of, resolved_yaml
from rayrl.driver.fleet import Fleet, start_sft_fleet
from rayrl.driver.preflight import check_sft_run
from rayrl.driver.result import RunResult
from rayrl.driver.run_failure import keeping_failure, marking_start
from rayrl.driver.stop_signal import StopSignal
from rayrl.errors import BudgetExhausted
from rayrl.infra.cluster import join_cluster, leave_cluster
from rayrl.infra.placement_plan import plan_sft_placement
from rayrl.tracking.metrics import Tracker
from rayrl.tracking.registry import make_tracker
from rayrl.tracking.run_folder import RunFolder
from rayrl.training.step import TrainStepResult
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.sft")


class SFTRun:
    """One supervised run; the result is exported as a model folder below `<run_dir>/export`."""

    def __init__(self, config: SFTRunConfig) -> None:
        self._config = config

    def train(self) -> RunResult:
        """Run to the end in this thread. Errors as in `Run.train`."""
        return asyncio.run(self._main())

    async def _main(self) -> RunResult:
        config = self._config
        for note in check_sft_run(config):
            _LOGGER.info("%s", note)
        text = resolved_yaml(config)
        folder = RunFolder.create(config.run_dir, text, digest_of(text), sys.argv, resume=False)
        with folder, keeping_failure(folder):
            return await self._in_cluster(folder)

    async def _in_cluster(self, folder: RunFolder) -> RunResult:
        config = self._config
        cluster = await asyncio.to_thread(join_cluster, plan_sft_placement(config).total.get("CPU", 0.0))
        stop = StopSignal()
        try:
            stop.install()
            tracker = make_tracker(config.tracking, folder, config.sft.num_steps)
            try:
                fleet = await start_sft_fleet(config)
                try:
                    return await self._train(fleet, folder, tracker, stop)
                finally:
                    await fleet.close()
            finally:
                tracker.close()
        finally:
            stop.uninstall()
            await asyncio.to_thread(leave_cluster, cluster)

    async def _train(self, fleet: Fleet, folder: RunFolder, tracker: Tracker, stop: StopSignal) -> RunResult:
        config = self._config
        stream = PromptStream(
            load_source(config.dataset),
            seed=config.run.seed,
            shuffle=config.dataset.shuffle,
            max_epochs=config.dataset.epochs,
        )
        stop.begin()
        losses: list[float] = []
        metrics: dict[str, float] = {}
        try:
            batch = self._encode(fleet, stream)
            for step in range(1, config.sft.num_steps + 1):
                current, batch = batch, self._encode(fleet, stream)
                start = time.monotonic()
                result = await self._step(fleet, step, current)
                metrics = {**result.metrics, "time/step_s": time.monotonic() - start}
                losses.append(metrics["loss/total"])
                tracker.log(step, metrics)
                if stop.reason is not None:
                    break
        finally:
            stop.uninstall()
        await fleet.train.call_all(
            "export_hf",
            str(folder.export),
            seconds=config.sft.deadlines.checkpoint_s,
            phase="export of the model folder",
        )
        return RunResult(
            status="stopped" if len(losses) < config.sft.num_steps else "done",
            steps=len(losses),
            metrics={**metrics, "loss/first": losses[0], "loss/last": losses[-1]},
            run_dir=folder.path,
        )

    def _encode(self, fleet: Fleet, stream: PromptStream) -> Any:
        """Return a reference to the next batch; a failure shows where the training workers take it."""
        sft = self._config.sft
        prompts = [stream.next_prompt() for _ in range(sft.batch_size)]
        for prompt in prompts:
            stream.account(prompt.id)
        handle = fleet.rollout.members[0].handle
        return handle.encode_examples.remote(prompts, sft.prompt_format, sft.system_prompt)

    async def _step(self, fleet: Fleet, step: int, batch: Any) -> TrainStepResult:
        with marking_start() if step > 1 else nullcontext():
            results = await fleet.train.call_all(
                "sft_step", step, batch, seconds=self._config.sft.deadlines.step_s, phase=f"supervised step {step}"
            )
        result: TrainStepResult = results[0]
        if result.skipped:
            raise BudgetExhausted(f"step {step} has no finite loss or gradient ({result.reason}); lower the lr")
        return result
