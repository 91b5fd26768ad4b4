"""The train loop: form a batch, train, publish, account, measure; then evaluate and save where due.

    group buffer --B groups--> train workers --new weights--> publisher --version--> engines, progress

    waits for                    unblocked by                                       bounded by
    enough groups                the rollout loop's followers                       deadlines.generation_s
    a training step              all train workers, the teacher before them         deadlines.step_s
    the running evaluation       rollout workers                                    the evaluation's own deadline
    a publication                train workers and engines                          deadlines.publication_s, each phase
    a checkpoint (its copy)      train workers                                      deadlines.checkpoint_s
    a recovery                   new train workers, the engines                     start_s, checkpoint_s, publication_s

The evaluation of a version is awaited before the next version is published, so that it runs on one version only.
Slots are given back when the step has ended, not when the batch was taken: memory and ages stay bounded.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import DROPPED_STALE
from rayrl.config.run import RunConfig
from rayrl.driver.batch import BatchPlan, plan_batch
from rayrl.driver.checkpointer import Checkpointer
from rayrl.driver.evaluator import Evaluator
from rayrl.driver.failure_budget import FailureBudget
from rayrl.driver.frozen_models import Teacher
from rayrl.driver.group_buffer import BufferedGroup, GroupBuffer
from rayrl.driver.kl_coef import next_kl_coef
from rayrl.driver.outcomes import OutcomeLog
from rayrl.driver.probe import WeightProbe
from rayrl.driver.progress import Progress
from rayrl.driver.publisher import PublicationRecord, Publisher
from rayrl.driver.rollout_log import RolloutLog
from rayrl.driver.rollout_loop import RolloutLoop
from rayrl.driver.staleness import oldest_allowed_version
from rayrl.driver.step_account import step_account
from rayrl.driver.step_metrics import StepTimes, batch_metrics
from rayrl.driver.stop_signal import StopSignal
from rayrl.driver.train_recovery import TrainRecovery
from rayrl.errors import DeadlineExceeded, RayrlError
from rayrl.infra.actor_group import ActorGroup
from rayrl.tracking.metrics import Tracker
from rayrl.training.step import TrainStepRequest, TrainStepResult, logprob_gap_fault
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.train")


@dataclass(slots=True, kw_only=True)
class TrainHistory:
    """What the summary of a run is made of."""

    reward_means: list[float] = field(default_factory=list)
    last_metrics: dict[str, float] = field(default_factory=dict)
    accuracies: list[float] = field(default_factory=list)


class TrainLoop:
    """Runs training steps until the run has all of them or is asked to stop."""

    def __init__(
        self,
        *,
        config: RunConfig,
        train: ActorGroup,
        buffer: GroupBuffer,
        progress: Progress,
        outcomes: OutcomeLog,
        ledger: Ledger,
        publisher: Publisher,
        evaluator: Evaluator,
        checkpointer: Checkpointer,
        rollout_loop: RolloutLoop,
        rollout_log: RolloutLog,
        tracker: Tracker,
        stop: StopSignal,
        recovery: TrainRecovery,
        probe: WeightProbe | None = None,
        more_metrics: Callable[[], Mapping[str, float]] = dict,
        teacher: Teacher | None = None,
    ) -> None:
        """`more_metrics` is asked once a step, for what others count."""
        self._config = config
        self._teacher = teacher
        self._train = train
        self._buffer = buffer
        self._progress = progress
        self._outcomes = outcomes
        self._ledger = ledger
        self._publisher = publisher
        self._evaluator = evaluator
        self._checkpointer = checkpointer
        self._rollout_loop = rollout_loop
        self._rollout_log = rollout_log
        self._tracker = tracker
        self._stop = stop
        self._recovery = recovery

        self._probe = probe
        self._more_metrics = more_metrics
        self._dropped = 0
        self._budget = FailureBudget(
            what="failed training steps (loss or gradient not finite, or engines and trainer too far apart)",
            limit=config.driver.max_skipped_steps,
            setting="driver.max_skipped_steps",
            advice="; usually training.optimizer.lr is too high",
            share=config.driver.max_failure_share,
        )
        self.history = TrainHistory()
        self.phase = "starting"
        """What the loop does or waits for, for status and the watchdog."""

    async def run(self) -> None:
        """Train until `driver.num_steps` or a stop; evaluate the last version."""
        try:
            await self._run()
        finally:
            await self._rollout_log.close()

    async def _run(self) -> None:
        if self._progress.step == 0:
            self._evaluator.start(self._progress.version)
        while self._progress.step < self._config.driver.num_steps:
            started, plan = time.monotonic(), None
            try:
                plan = await self._next_batch()
                if plan is None:
                    break
                await self._step(plan, waited_s=time.monotonic() - started)
            except RayrlError as error:
                await self.recover(error, () if plan is None else plan.chosen)
        self.phase = "last evaluation"
        if self._stop.reason is not None:
            # The time left, which may be short, is for the checkpoint.
            await self._evaluator.close()
        await self._collect_evaluation()
        if self._evaluator.is_enabled and self._stop.reason is None:
            if self.history.last_metrics.get("eval/version") != self._progress.version:
                self._evaluator.start(self._progress.version)
            await self._collect_evaluation()
        await self._rollout_log.finish()
        self._budget.finish()

    async def recover(self, error: RayrlError, taken: Sequence[BufferedGroup] = ()) -> None:
        """Go back to the newest checkpoint if a training worker was lost; `taken` are groups out of the buffer.

        Raises `error` if that would not help.
        """
        self.phase = f"recovery after step {self._progress.step}"
        await self._recovery.recover(error, taken)
        self._buffer.forget_interruption()

    async def _next_batch(self) -> BatchPlan | None:
        """Wait for a full batch and take it out of the buffer; None if the run is asked to stop first."""
        driver = self._config.driver
        while True:
            self.phase = f"waiting for {driver.groups_per_step} groups"
            try:
                await self._buffer.wait(
                    lambda buffer: self._stop.reason is not None or len(buffer) >= driver.groups_per_step,
                    idle_s=driver.deadlines.generation_s,
                    waiting_for=f"step {self._progress.step + 1} needs {driver.groups_per_step} groups",
                )
            except DeadlineExceeded:
                # What ended the rollout loop, a kind of TimeoutError too: it names its own actor and limit.
                raise
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"{error}; driver.deadlines.generation_s={driver.deadlines.generation_s}; rollout loop: "
                    f"{self._rollout_loop.status()}; counts: {self._progress.snapshot()}"
                ) from None
            if self._stop.reason is not None:
                return None
            plan = plan_batch(
                self._buffer.in_order(),
                version=self._progress.version,
                groups_per_step=driver.groups_per_step,
                max_staleness=driver.max_staleness,
                on_stale=driver.on_stale,
            )
            self._drop(plan)
            if plan.is_complete:
                self._buffer.remove([group.ticket for group in plan.chosen])
                return plan

    def _drop(self, plan: BatchPlan) -> None:
        if not plan.dropped:
            return
        self._buffer.remove([group.ticket for group in plan.dropped])
        for group in plan.dropped:
            self._outcomes.send_back(group.summary)
            self._ledger.record_event(
                DROPPED_STALE, step=self._progress.step, detail={"prompt_id": str(group.summary.prompt_id)}
            )
        self._dropped += len(plan.dropped)
        self._progress.release(len(plan.dropped), consumed=False)
        _LOGGER.warning(
            "%d groups were older than driver.max_staleness=%d and are sampled again (%d so far); if this goes on, "
            "slow prompts are starved: raise the bound or use on_stale: mask",
            len(plan.dropped),
            self._config.driver.max_staleness,
            self._dropped,
        )

    async def _step(self, plan: BatchPlan, *, waited_s: float) -> None:
        step = self._progress.step + 1
        times = StepTimes(waited_s=waited_s)
        summaries = [group.summary for group in plan.chosen]
        # Between the step and its publication no engine may be given weights: the trainer's are ahead of the version.
        async with self._publisher.lock:
            result = await self._train_on(plan, step, times)
            detail = step_account(plan, result, version=self._progress.version)
            if not result.skipped:
                record = await self._publish(self._progress.version + 1, times)
                # Nothing may come between: an engine that is lost from now on has acknowledged the version.
                self._outcomes.train(
                    summaries, step=step, version=record.version, detail=detail, published=record.published
                )
                await self.check_engines(step)
                self._progress.kl_coef = next_kl_coef(
                    self._config.algorithm.kl, self._progress.kl_coef, result.metrics, self._config.samples_per_step
                )
        if result.skipped:
            reason = result.reason or "not finite"
            self._outcomes.filter(summaries, step=step, version=self._progress.version, reason=reason, detail=detail)
        # Only after the publication: capacity that opens earlier would let groups start on weights about to be old.
        self._progress.release(len(plan.chosen), consumed=not result.skipped)
        self._progress.step = step
        await self._rollout_log.write(step, [group.batch for group in plan.chosen])
        metrics = {
            **batch_metrics(plan, times=times, samples_per_step=self._config.samples_per_step),
            **result.metrics,
        }
        metrics |= {
            "train/version": float(self._progress.version),
            "train/skipped_steps": float(self._budget.total),
            "rollout/dropped_stale_groups": float(self._dropped),
            "rollout/given_up_groups": float(self._rollout_loop.num_failed),
            "rollout/resampled_groups": float(self._rollout_loop.num_resampled),
            "rollout/filtered_groups": float(self._rollout_loop.num_filtered),
            "rollout/groups_in_flight": float(self._rollout_loop.num_in_flight),
            "rollout/groups_buffered": float(len(self._buffer)),
            **self._checkpointer.metrics(),
            **self._recovery.metrics(),
            **self._more_metrics(),
        }
        self.history.reward_means.append(metrics["reward/mean"])
        self._log(step, metrics)
        self._note_fault(result, step)
        await self._after_step(step)

    def _note_fault(self, result: TrainStepResult, step: int) -> None:
        """Count a step that was skipped, or that some engine of training should have skipped and could not."""
        fault = (result.reason or "not finite") if result.skipped else self._gap_fault(result)
        if fault is None:
            self._budget.succeed()
        else:
            _LOGGER.warning("training step %d failed: %s", step, fault)
            self._budget.fail(f"step {step}: {fault}")

    def _gap_fault(self, result: TrainStepResult) -> str | None:
        # The metrics of a whole training step are means per token already.
        return logprob_gap_fault(result.metrics, 1.0, self._config.training.max_logprob_gap)

    async def _train_on(self, plan: BatchPlan, step: int, times: StepTimes) -> TrainStepResult:
        driver = self._config.driver
        self.phase = f"training step {step}"
        request = TrainStepRequest(
            step=step,
            version=self._progress.version,
            min_version=oldest_allowed_version(
                version=self._progress.version, max_staleness=driver.max_staleness, on_stale=driver.on_stale
            ),
            kl_coef=self._progress.kl_coef,
        )
        if plan.num_kept_stale:
            _LOGGER.warning(
                "step %d trains on %d groups beyond max_staleness (on_stale: keep)", step, plan.num_kept_stale
            )
        start = time.monotonic()
        batches = [group.batch for group in plan.chosen]
        if self._teacher is not None:
            batches = await self._teacher.annotate(batches)
        results = await self._train.call_all(
            "train_step",
            request,
            *batches,
            seconds=driver.deadlines.step_s,
            phase=f"training step {step}",
        )
        times.train_s = time.monotonic() - start
        result: TrainStepResult = results[0]
        return result

    async def _publish(self, version: int, times: StepTimes) -> PublicationRecord:
        self.phase = f"evaluation of version {self._progress.version}"
        start = time.monotonic()
        await self._collect_evaluation(abandon_if=lambda: not self._publisher.serving)
        times.evaluation_wait_s = time.monotonic() - start
        self.phase = f"publication of version {version}"
        record = await self._publisher.publish(version)
        self._progress.publish(version)
        times.publication = record
        return record

    async def check_engines(self, step: int) -> None:
        """Look at what the engines hold, where that is due; hold the publisher's lock."""
        if self._probe is None:
            return
        self.phase = f"probe of version {self._progress.version}"
        metrics = await self._probe.check_if_due(self._progress.version, step=step)
        if metrics:
            self._log(step, dict(metrics))

    async def _after_step(self, step: int) -> None:
        await self._checkpointer.note_ended()
        if self._evaluator.is_due(step) and step < self._config.driver.num_steps:
            await self._collect_evaluation()
            self._evaluator.start(self._progress.version)
        if self._checkpointer.is_due(step) and step < self._config.driver.num_steps:
            self.phase = f"checkpoint of step {step}"
            # A step that a checkpoint counts is never done again: its trajectories must be on disk before.
            await self._rollout_log.finish()
            await self._checkpointer.save()

    async def _collect_evaluation(self, abandon_if: Callable[[], bool] | None = None) -> None:
        metrics = await self._evaluator.finish(abandon_if)
        if metrics is None:
            return
        self.history.accuracies.append(metrics["eval/accuracy"])
        if metrics["eval/other_version_share"] > 0:
            _LOGGER.warning("evaluation ran on more than one version: %s", metrics)
        self._checkpointer.note_evaluation(metrics)
        self._log(self._progress.step, metrics)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.history.last_metrics |= metrics
        self._tracker.log(step, metrics)

    def status(self) -> dict[str, Any]:
        """Return what the loop does and its counts."""
        return {"phase": self.phase, **{name: getattr(self._progress, name) for name in ("step", "version")}}


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
