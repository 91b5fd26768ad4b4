"""One live step with the outcomes that it decided and the trajectories that it consumed."""

from collections import defaultdict
from dataclasses import dataclass, replace

from rayrl.audit.run_record import RunRecord
from rayrl.audit.step_rollouts import StepRollouts
from rayrl.checkpoint.ledger_events import ROLLOUT_LOG_LOST, RUN_ENDED, RUN_STARTED
from rayrl.checkpoint.ledger_reader import EventRow, PromptRow, StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One live step."""

    row: StepRow
    prompts: tuple[PromptRow, ...]
    """Outcomes of the same transaction."""
    rollouts: StepRollouts | None
    """Its file of the rollout log, if there is one."""
    started_from: int
    """Version that the live step before it left; 0 for the first."""
    is_last: bool

    @property
    def is_skipped(self) -> bool:
        """True if the step changed nothing: its groups were filtered."""
        return bool(self.prompts) and all(item.outcome == "filtered" for item in self.prompts)


def step_views(run: RunRecord) -> list[StepView]:
    """Return the live steps in order."""
    by_position: dict[int, list[PromptRow]] = defaultdict(list)
    for item in run.ledger.live_prompts:
        by_position[item.stamp.position].append(item)
    steps = run.ledger.live_steps
    views = [
        StepView(
            row=row,
            prompts=tuple(by_position[row.stamp.position]),
            rollouts=run.rollouts.get(row.step),
            started_from=steps[index - 1].version if index else 0,
            is_last=index == len(steps) - 1,
        )
        for index, row in enumerate(steps)
    ]
    return [replace(view, rollouts=None) if _is_leftover(run, view) else view for view in views]


def _is_leftover(run: RunRecord, view: StepView) -> bool:
    """Whether the file of the last step is that of an earlier try, which the run was cut off before it replaced."""
    if view.rollouts is None or expects_rollouts(run, view):
        return False
    return view.rollouts.digest != view.row.detail.get("data_digest", view.rollouts.digest)


def ended_in_order(run: RunRecord) -> bool:
    """Whether the last thing that the ledger holds is that the run left in order."""
    return bool(run.ledger.events) and run.ledger.events[-1].kind == RUN_ENDED


def lost_log_event(run: RunRecord, view: StepView) -> EventRow | None:
    """Return the event that says why the file of a step was never written, if there is one."""
    starts = [event.position for event in run.ledger.events if event.kind == RUN_STARTED]
    position = view.row.stamp.position
    for event in run.ledger.events:
        if event.kind != ROLLOUT_LOG_LOST:
            continue
        end = min((start for start in starts if start > event.position), default=run.ledger.position + 1)
        began = max((start for start in starts if start < event.position), default=0)
        # A write ends after its step, and often after the next one.
        if began < position < end and (view.row.step >= event.step or position > event.position):
            return event
    return None


def expects_rollouts(run: RunRecord, view: StepView) -> bool:
    """Whether the file of a step must be there. The log is written one step behind, checkpoints wait for it: a run
    that was cut off, had to leave early, or still goes on, may lack the file of its last step."""
    is_done = ended_in_order(run) and run.ledger.events[-1].detail.get("status") == "done"
    is_written = run.config.tracking.rollout_log and lost_log_event(run, view) is None
    return is_written and (is_done or not view.is_last)


def masked_below(run: RunRecord, view: StepView) -> int | None:
    """Return the version below which tokens of a step must carry no loss; None where the policy masks nothing."""
    driver = run.config.driver
    return view.started_from - driver.max_staleness if driver.on_stale == "mask" else None


def tokens_in_loss(run: RunRecord, view: StepView) -> int:
    """Return how many tokens of a step carry loss after masking, counted anew from its rollout log."""
    assert view.rollouts is not None, "only for steps with a rollout log"
    if view.is_skipped:
        return 0
    lowest = masked_below(run, view)
    cut = view.rollouts.truncated_by_version if run.config.algorithm.shaping.mask_truncated else {}
    return sum(
        count - cut.get(version, 0)
        for version, count in view.rollouts.tokens_by_version.items()
        if lowest is None or version >= lowest
    )
