"""The parts of a running run, put together, and their course from the first weights to the last checkpoint."""

import asyncio
from dataclasses import dataclass
from typing import Any

import yaml

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.retention import RetentionRule
from rayrl.checkpoint.store import Checkpoint, CheckpointStore
from rayrl.config.base import Section
from rayrl.config.digest import digest_of
from rayrl.config.run import RunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.driver.checkpointer import Checkpointer
from rayrl.driver.ending import ending_with
from rayrl.driver.evaluator import Evaluator
from rayrl.driver.fleet import Fleet
from rayrl.driver.frozen_models import Teacher
from rayrl.driver.grace import within_grace
from rayrl.driver.group_buffer import GroupBuffer
from rayrl.driver.kl_coef import first_kl_coef
from rayrl.driver.outcomes import OutcomeLog
from rayrl.driver.probe import WeightProbe
from rayrl.driver.progress import Progress
from rayrl.driver.publisher import Publisher
from rayrl.driver.result import RunResult
from rayrl.driver.rollout_log import RolloutLog
from rayrl.driver.rollout_loop import RolloutLoop
from rayrl.driver.run_failure import marking_start
from rayrl.driver.run_history import read_history
from rayrl.driver.run_record import recording_run
from rayrl.driver.stop_signal import StopSignal
from rayrl.driver.supervisor import Supervisor
from rayrl.driver.train_loop import TrainLoop, summary_metrics
from rayrl.driver.train_recovery import TrainRecovery
from rayrl.driver.watchdog import Watchdog
from rayrl.errors import RayrlError
from rayrl.infra.placement_plan import TEACHER_ROLE
from rayrl.tracking.metrics import Tracker
from rayrl.tracking.run_folder import RunFolder
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver")


def resolved_yaml(config: Section) -> str:
    """Return a config with all its defaults as YAML."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text


@dataclass(slots=True, kw_only=True)
class Assembly:
    """The parts of a running run."""

    config: RunConfig
    fleet: Fleet
    folder: RunFolder
    ledger: Ledger
    stream: PromptStream
    stop: StopSignal
    progress: Progress
    buffer: GroupBuffer
    publisher: Publisher
    supervisor: Supervisor
    evaluator: Evaluator
    checkpointer: Checkpointer
    rollout_loop: RolloutLoop
    train_loop: TrainLoop
    recovery: TrainRecovery
    watchdog: Watchdog

    @classmethod
    def build(
        cls,
        config: RunConfig,
        fleet: Fleet,
        folder: RunFolder,
        ledger: Ledger,
        tracker: Tracker,
        stop: StopSignal,
    ) -> "Assembly":
        assert fleet.inference is not None
        stream = _stream(config)
        outcomes = OutcomeLog(stream=stream, ledger=ledger)
        progress = Progress(kl_coef=first_kl_coef(config.algorithm.kl))
        buffer = GroupBuffer()
        publisher = Publisher(config=config, train=fleet.train, inference=fleet.inference)
        evaluator = Evaluator(config=config, workers=fleet.rollout)
        checkpointer = _checkpointer(config, fleet, folder, buffer, stream, progress, ledger)
        rollout_loop = RolloutLoop(
            config=config, outcomes=outcomes, workers=fleet.rollout, buffer=buffer, progress=progress
        )
        supervisor = _supervise(config, fleet, publisher, rollout_loop, progress, ledger)
        recovery = TrainRecovery(
            config=config,
            fleet=fleet,
            publisher=publisher,
            checkpointer=checkpointer,
            evaluator=evaluator,
            rollout_loop=rollout_loop,
            buffer=buffer,
            progress=progress,
            ledger=ledger,
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
            rollout_log=_rollout_log(config, folder, fleet, ledger),
            tracker=tracker,
            stop=stop,
            recovery=recovery,
            probe=_probe(config, fleet, publisher, ledger),
            more_metrics=supervisor.metrics,
            teacher=_teacher(config, fleet),
        )
        supervisor.on_push_failed = buffer.interrupt
        return cls(
            config=config,
            fleet=fleet,
            folder=folder,
            ledger=ledger,
            stream=stream,
            stop=stop,
            progress=progress,
            buffer=buffer,
            publisher=publisher,
            supervisor=supervisor,
            evaluator=evaluator,
            checkpointer=checkpointer,
            rollout_loop=rollout_loop,
            train_loop=train_loop,
            recovery=recovery,
            watchdog=_watch(config, fleet, folder, ledger, train_loop, rollout_loop, buffer, progress),
        )

    async def run(self, checkpoint: Checkpoint | None) -> RunResult:
        """Push the weights, run both loops, save and export."""
        await self._put_back(checkpoint)
        if checkpoint is not None:
            # Else the first evaluation of this process would be told as the one before training.
            self.train_loop.history = await asyncio.to_thread(read_history, self.folder.metrics_path, checkpoint.step)
        with marking_start():
            async with recording_run(self.ledger, self.stream, self.progress, self.folder.path) as ending:
                try:
                    result = await within_grace(
                        self._run(), self.stop, self.config.checkpoint.grace_s, self._leave_early
                    )
                finally:
                    await self.checkpointer.close()
                ending.status = result.status
            return result

    async def _put_back(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            # A folder whose run died before its first checkpoint: what it had recorded is sampled again.
            if self.ledger.position > 0:
                self.ledger.rewind_to(0, min_position=0)
            return
        while True:
            try:
                return await self.checkpointer.restore(checkpoint)
            except RayrlError as error:
                await self.recovery.renew(error)

    async def _run(self) -> RunResult:
        try:
            return await ending_with(self._supervised(), self.supervisor.run())
        finally:
            # Before the fleet is closed: actors that are asked to leave are not lost.
            await self.supervisor.close()

    async def _supervised(self) -> RunResult:
        try:
            await self._publish_first()
        except RayrlError as error:
            # A training worker may die before there was a step; the recovery publishes, too.
            await self.train_loop.recover(error)
        rollouts = asyncio.create_task(self.rollout_loop.run())
        waker = asyncio.create_task(self._wake_on_stop())
        try:
            while True:
                await self.watchdog.guard(self.train_loop.run())
                try:
                    return await self._finish()
                except RayrlError as error:
                    # A training worker may die in the last save, too: the steps since the one before are done again.
                    await self.train_loop.recover(error)
        finally:
            for task in (rollouts, waker):
                task.cancel()
            await asyncio.gather(rollouts, waker, return_exceptions=True)
            await self.rollout_loop.close()
            await self.evaluator.close()

    async def _publish_first(self) -> None:
        # Engines start without weights on purpose: after a resume those of the model folder would be the wrong ones.
        async with self.publisher.lock:
            record = await self.publisher.publish(self.progress.version)
            self.ledger.record_publication(record.published, step=self.progress.step)
            await self.train_loop.check_engines(self.progress.step)

    async def _wake_on_stop(self) -> None:
        await self.stop.wait()
        self.buffer.wake()

    async def _finish(self) -> RunResult:
        is_done = self.progress.step >= self.config.driver.num_steps
        if self.config.checkpoint.at_end:
            _LOGGER.info("writing the last checkpoint")
            await self.checkpointer.save_now()
        else:
            await self.checkpointer.finish_writing()
        if is_done and self.config.checkpoint.export_hf:
            _LOGGER.info("writing the model folder %s", self.folder.export)
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

    def _leave_early(self) -> RunResult:
        saved = self.checkpointer.saved_step
        _LOGGER.warning(
            "checkpoint.grace_s=%s is over: leaving with %s; the steps since are lost and will be done again",
            self.config.checkpoint.grace_s,
            "no checkpoint" if saved is None else f"the checkpoint of step {saved}",
        )
        return RunResult(
            status="stopped",
            steps=saved or 0,
            metrics=summary_metrics(self.train_loop.history),
            run_dir=self.folder.path,
        )

    def status(self) -> dict[str, Any]:
        """Return what both loops do."""
        return {
            **self.train_loop.status(),
            **self.rollout_loop.status(),
            "buffered": len(self.buffer),
            "supervision": self.supervisor.status(),
            "training": {member.name: member.pid for member in self.fleet.train.members},
        }


def _stream(config: RunConfig) -> PromptStream:
    dataset = config.dataset
    source = load_source(dataset)
    return PromptStream(source, seed=config.run.seed, shuffle=dataset.shuffle, max_epochs=dataset.epochs)


def _teacher(config: RunConfig, fleet: Fleet) -> Teacher | None:
    group = fleet.frozen.get(TEACHER_ROLE)
    return None if group is None else Teacher(group, config.driver.deadlines.step_s)


def _supervise(
    config: RunConfig,
    fleet: Fleet,
    publisher: Publisher,
    rollout_loop: RolloutLoop,
    progress: Progress,
    ledger: Ledger,
) -> Supervisor:
    """Return a supervisor that the others report to."""
    supervisor = Supervisor(
        config=config,
        engines=fleet.starters["inference"],
        workers=fleet.starters["rollout"],
        publisher=publisher,
        progress=progress,
        ledger=ledger,
    )
    rollout_loop.on_fault = supervisor.report
    supervisor.on_node_lost = rollout_loop.lose_node
    return supervisor


def _watch(
    config: RunConfig,
    fleet: Fleet,
    folder: RunFolder,
    ledger: Ledger,
    train_loop: TrainLoop,
    rollout_loop: RolloutLoop,
    buffer: GroupBuffer,
    progress: Progress,
) -> Watchdog:
    return Watchdog(
        config=config,
        progress=progress,
        buffer=buffer,
        phase=lambda: train_loop.phase,
        rollout_loop=rollout_loop,
        groups=fleet.groups,
        ledger=ledger,
        logs=folder.logs,
    )


def _rollout_log(config: RunConfig, folder: RunFolder, fleet: Fleet, ledger: Ledger) -> RolloutLog:
    return RolloutLog(
        folder=folder.rollouts,
        workers=fleet.rollout,
        is_enabled=config.tracking.rollout_log,
        deadline_s=config.driver.deadlines.checkpoint_s,
        ledger=ledger,
    )


def _checkpointer(
    config: RunConfig,
    fleet: Fleet,
    folder: RunFolder,
    buffer: GroupBuffer,
    stream: PromptStream,
    progress: Progress,
    ledger: Ledger,
) -> Checkpointer:
    return Checkpointer(
        config=config,
        store=CheckpointStore(folder.checkpoints, rule=RetentionRule.of(config.checkpoint)),
        run_id=folder.run_id,
        config_digest=digest_of(resolved_yaml(config)),
        train=fleet.train,
        workers=fleet.rollout,
        buffer=buffer,
        stream=stream,
        progress=progress,
        ledger=ledger,
    )


def _probe(config: RunConfig, fleet: Fleet, publisher: Publisher, ledger: Ledger) -> WeightProbe:
    assert fleet.inference is not None
    return WeightProbe(config=config, train=fleet.train, inference=fleet.inference, publisher=publisher, ledger=ledger)
