"""`Run`: a reinforcement learning run from config to result.

    preflight -> run folder (locked) -> cluster -> fleet -> weights to engines -> both loops -> save, export, leave

Both loops share one event loop and the objects that `_Assembly` puts together. Shutdown: a stop (signal, `stop()`) ends
the train loop after its step; a failure ends it at its next wait; then, in both cases, the rollout loop is cancelled,
and the fleet is closed: actors leave in order or are killed after `deadlines.shutdown_s`.
"""

import asyncio
import hashlib
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rayrl.checkpoint.compatibility import check_compatible
from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.store import Checkpoint, CheckpointStore
from rayrl.config.loader import parse_section
from rayrl.config.run import RunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.driver.checkpointer import Checkpointer
from rayrl.driver.evaluator import Evaluator
from rayrl.driver.fleet import Fleet, start_fleet
from rayrl.driver.group_buffer import GroupBuffer
from rayrl.driver.outcomes import OutcomeLog
from rayrl.driver.preflight import check_run
from rayrl.driver.progress import Progress
from rayrl.driver.publisher import Publisher
from rayrl.driver.result import RunResult
from rayrl.driver.rollout_log import RolloutLog
from rayrl.driver.rollout_loop import RolloutLoop
from rayrl.driver.stop_signal import StopSignal
from rayrl.driver.train_loop import TrainHistory, TrainLoop
from rayrl.errors import ActorError, DeadlineExceeded, PlacementError
from rayrl.infra.cluster import join_cluster, leave_cluster
from rayrl.infra.placement_plan import plan_placement
from rayrl.tracking.metrics import Tracker
from rayrl.tracking.registry import make_tracker
from rayrl.tracking.run_folder import RunFolder
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver")

Resume = Literal["never", "auto"] | Path


def resolved_yaml(config: Any) -> str:
    """Return a config with all its defaults as YAML."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text


def digest_of(text: str) -> str:
    """Return a short fingerprint of a config."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
        self._loop: _Assembly | None = None
        self._stop: StopSignal | None = None

    def train(self) -> RunResult:
        """Run to the end in this thread. SIGTERM and Ctrl-C finish the step, save and leave.

        Raises: ConfigError and its kinds before anything is started; PlacementError; and what ended the run.
        """
        return asyncio.run(self._main())

    def start(self) -> "RunHandle":
        """Run in a thread of this process and return at once."""
        return RunHandle(self)

    def status(self) -> dict[str, Any]:
        """Return what the run does at the moment."""
        return {"phase": "not started"} if self._loop is None else self._loop.status()

    async def _main(self) -> RunResult:
        self._stop = StopSignal()
        config = self._config
        for note in check_run(config):
            _LOGGER.info("%s", note)
        text = resolved_yaml(config)
        folder = RunFolder.create(config.run_dir, text, digest_of(text), sys.argv, resume=self._resume != "never")
        with folder:
            try:
                checkpoint = self._open_checkpoint(folder)
                folder.accept_resume()
                return await self._in_cluster(folder, checkpoint)
            except PlacementError:
                # Nothing was started, so nothing must be in the way of the next try.
                if not folder.resumed:
                    shutil.rmtree(folder.path)
                raise
            except Exception:  # the boundary where the last failure of a run is kept; it is raised again
                (folder.logs / "failure.txt").write_text(traceback.format_exc(), encoding="utf-8")
                raise

    def _open_checkpoint(self, folder: RunFolder) -> Checkpoint | None:
        if self._resume == "never":
            return None
        store = CheckpointStore(folder.checkpoints, self._config.checkpoint.keep_last)
        if isinstance(self._resume, Path):
            checkpoint = store.open(self._resume, run_id=folder.run_id)
        else:
            newest = store.latest()
            if newest is None:
                if folder.resumed and folder.metrics_path.exists() and folder.metrics_path.stat().st_size > 0:
                    _LOGGER.warning("no complete checkpoint in %s: starting at step 0", folder.checkpoints)
                return None
            checkpoint = store.open(newest.path, run_id=folder.run_id)
        # Resolved by this rayrl: a field that came later has its default on both sides, and is no difference.
        saved = parse_section(RunConfig, yaml.safe_load(folder.saved_config()), source=str(folder.config_path))
        check_compatible(saved.model_dump(mode="json"), self._config.model_dump(mode="json"))
        _LOGGER.info("resuming from step %d: %s", checkpoint.step, checkpoint.path)
        return checkpoint

    async def _in_cluster(self, folder: RunFolder, checkpoint: Checkpoint | None) -> RunResult:
        config = self._config
        cluster = await asyncio.to_thread(join_cluster, plan_placement(config).total.get("CPU", 0.0))
        try:
            tracker = make_tracker(config.tracking, folder, config.driver.num_steps)
            try:
                return await self._with_fleet(folder, checkpoint, tracker)
            finally:
                tracker.close()
        finally:
            await asyncio.to_thread(leave_cluster, cluster)

    async def _with_fleet(self, folder: RunFolder, checkpoint: Checkpoint | None, tracker: Tracker) -> RunResult:
        assert self._stop is not None
        start = time.monotonic()
        tracker.message(f"run folder: {folder.path}")
        fleet = await start_fleet(self._config)
        tracker.message(f"all actors are ready after {time.monotonic() - start:.1f} s")
        try:
            with closing(Ledger.open(folder.ledger_path)) as ledger:
                assembly = _Assembly.build(self._config, fleet, folder, ledger, tracker, self._stop)
                self._loop = assembly
                self._stop.install()
                try:
                    return await assembly.run(checkpoint)
                finally:
                    self._stop.uninstall()
        finally:
            await fleet.close()

    def request_stop(self) -> None:
        """Ask for a graceful stop; only from the run's own event loop."""
        if self._stop is not None:
            self._stop.request("stop() was called")


@dataclass(slots=True, kw_only=True)
class _Assembly:
    """The parts of a running run."""

    config: RunConfig
    fleet: Fleet
    folder: RunFolder
    ledger: Ledger
    stop: StopSignal
    progress: Progress
    buffer: GroupBuffer
    publisher: Publisher
    evaluator: Evaluator
    checkpointer: Checkpointer
    rollout_loop: RolloutLoop
    train_loop: TrainLoop

    @classmethod
    def build(
        cls,
        config: RunConfig,
        fleet: Fleet,
        folder: RunFolder,
        ledger: Ledger,
        tracker: Tracker,
        stop: StopSignal,
    ) -> "_Assembly":
        assert fleet.inference is not None
        source = load_source(config.dataset)
        stream = PromptStream(source, seed=config.run.seed, shuffle=config.dataset.shuffle)
        outcomes = OutcomeLog(stream=stream, ledger=ledger)
        progress = Progress()
        buffer = GroupBuffer()
        publisher = Publisher(config=config, train=fleet.train, inference=fleet.inference)
        evaluator = Evaluator(config=config, workers=fleet.rollout)
        checkpointer = Checkpointer(
            config=config,
            store=CheckpointStore(folder.checkpoints, config.checkpoint.keep_last),
            run_id=folder.run_id,
            config_digest=digest_of(resolved_yaml(config)),
            train=fleet.train,
            workers=fleet.rollout,
            buffer=buffer,
            stream=stream,
            progress=progress,
            ledger=ledger,
        )
        rollout_loop = RolloutLoop(
            config=config, outcomes=outcomes, workers=fleet.rollout, buffer=buffer, progress=progress
        )
        train_loop = TrainLoop(
            config=config,
            train=fleet.train,
            buffer=buffer,
            progress=progress,
            outcomes=outcomes,
            ledger=ledger,
            publisher=publisher,
            evaluator=evaluator,
            checkpointer=checkpointer,
            rollout_loop=rollout_loop,
            rollout_log=RolloutLog(
                folder=folder.rollouts,
                workers=fleet.rollout,
                is_enabled=config.tracking.rollout_log,
                deadline_s=config.driver.deadlines.checkpoint_s,
            ),
            tracker=tracker,
            stop=stop,
        )
        return cls(
            config=config,
            fleet=fleet,
            folder=folder,
            ledger=ledger,
            stop=stop,
            progress=progress,
            buffer=buffer,
            publisher=publisher,
            evaluator=evaluator,
            checkpointer=checkpointer,
            rollout_loop=rollout_loop,
            train_loop=train_loop,
        )

    async def run(self, checkpoint: Checkpoint | None) -> RunResult:
        """Push the weights, run both loops, save and export."""
        if checkpoint is not None:
            await self.checkpointer.restore(checkpoint)
        else:
            # A folder whose run died before its first checkpoint: what it had recorded is sampled again.
            self.ledger.rewind_to(0, min_position=0)
        await self.publisher.connect()
        # Engines start without weights on purpose: after a resume those of the model folder would be the wrong ones.
        record = await self.publisher.publish(self.progress.version)
        self.ledger.record_publication(record.version, record.digest, record.engines, step=self.progress.step)
        rollouts = asyncio.create_task(self.rollout_loop.run())
        waker = asyncio.create_task(self._wake_on_stop())
        try:
            await self.train_loop.run()
        finally:
            for task in (rollouts, waker):
                task.cancel()
            await asyncio.gather(rollouts, waker, return_exceptions=True)
            await self.rollout_loop.close()
            await self.evaluator.close()
        return await self._finish()

    async def _wake_on_stop(self) -> None:
        await self.stop.wait()
        self.buffer.wake()

    async def _finish(self) -> RunResult:
        is_done = self.progress.step >= self.config.driver.num_steps
        if self.config.checkpoint.at_end:
            await self.checkpointer.save()
        if is_done and self.config.checkpoint.export_hf:
            await self.fleet.train.call_all(
                "export_hf",
                str(self.folder.export),
                seconds=self.config.driver.deadlines.checkpoint_s,
                phase="export of the model folder",
            )
        return RunResult(
            status="done" if is_done else "stopped",
            steps=self.progress.step,
            metrics=summary_metrics(self.train_loop.history),
            run_dir=self.folder.path,
        )

    def status(self) -> dict[str, Any]:
        """Return what both loops do."""
        return {**self.train_loop.status(), **self.rollout_loop.status(), "buffered": len(self.buffer)}


def summary_metrics(history: TrainHistory) -> Mapping[str, float]:
    """Return the last value of each metric, and first values and means of five where a curve is asked for."""
    metrics = dict(history.last_metrics)
    rewards = history.reward_means
    if rewards:
        metrics |= {
            "reward/first": rewards[0],
            "reward/last": rewards[-1],
            "reward/first5_mean": sum(rewards[:5]) / len(rewards[:5]),
            "reward/last5_mean": sum(rewards[-5:]) / len(rewards[-5:]),
        }
    if history.accuracies:
        metrics["eval/accuracy_before"] = history.accuracies[0]
    return metrics


class RunHandle:
    """A run in a thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._target, name="rayrl-run", daemon=True)
        self._thread.start()

    def _target(self) -> None:
        async def main() -> RunResult:
            self._event_loop = asyncio.get_running_loop()
            return await self._run._main()

        try:
            self._result = asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - kept for `wait`, which raises it in the caller's thread
            self._error = error

    def status(self) -> dict[str, Any]:
        """Return what the run does: phase, step, version, groups in flight and buffered."""
        if self._error is not None:
            return {"phase": "failed", "error": f"{type(self._error).__name__}: {self._error}"}
        if self._result is not None:
            return {"phase": self._result.status, "step": self._result.steps}
        return self._run.status()

    def stop(self) -> None:
        """Ask the run to finish its step, save and leave; `wait` then returns a result with status `stopped`."""
        if self._event_loop is not None and self._thread.is_alive():
            self._event_loop.call_soon_threadsafe(self._run.request_stop)

    def wait(self, timeout_s: float | None = None) -> RunResult:
        """Return the result. Raises what ended the run, or DeadlineExceeded if it still runs after `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the run still goes on after {timeout_s} s: {self.status()}")
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise ActorError("the run ended without a result")
        return self._result
