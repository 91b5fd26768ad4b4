"""Are steps and versions contiguous, and do the denominators add up?"""

from rayrl.audit.finding import Finding, judge
from rayrl.audit.run_record import RunRecord
from rayrl.audit.step_view import StepView, expects_rollouts, lost_log_event, step_views, tokens_in_loss


def check_steps(run: RunRecord) -> Finding:
    """Return whether steps are 1, 2, 3, ... and each one starts from the version that the one before it left."""
    violations = []
    expected, version = 1, 0
    for view in step_views(run):
        row = view.row
        if row.step != expected:
            violations.append(f"step {row.step} follows step {expected - 1}")
        made = version if view.is_skipped else version + 1
        if row.version != made:
            what = "changed nothing" if view.is_skipped else f"started from version {version}"
            violations.append(f"step {row.step} left version {row.version}; it {what}, so it must be {made}")
        started = row.detail.get("trained_version")
        if started is not None and started != version:
            violations.append(f"step {row.step} says that it started from version {started}, not {version}")
        expected, version = row.step + 1, row.version
    return judge("steps", "steps and versions are contiguous from the first on", violations)


def check_denominators(run: RunRecord) -> Finding:
    """Return whether the counts that each step recorded are those of the trajectories that it consumed."""
    violations: list[str] = []
    for view in step_views(run):
        violations += _step_faults(run, view)
    claim = "loss tokens, trajectories and data of each step are those of its rollout log"
    return judge("denominators", claim, violations, _missing(run))


def _missing(run: RunRecord) -> str:
    if not run.config.tracking.rollout_log:
        return "the rollout log: tracking.rollout_log is off"
    views = step_views(run)
    for view in views:
        event = lost_log_event(run, view)
        if event is not None and view.rollouts is None:
            return f"the rollout log from step {view.row.step} on, which could not be written: {event.detail['error']}"
    old = [view.row.step for view in views if "data_digest" not in view.row.detail]
    return f"the denominators of step {old[0]}, which an older rayrl did not record" if old else ""


def _step_faults(run: RunRecord, view: StepView) -> list[str]:
    row, detail, rollouts = view.row, view.row.detail, view.rollouts
    where = f"step {row.step}"
    faults = []
    if len(view.prompts) != detail.get("groups", len(view.prompts)):
        faults.append(f"{where} recorded {detail['groups']} groups, the ledger has {len(view.prompts)} of them")
    if rollouts is None:
        name = f"rollouts/step_{row.step:06d}.parquet"
        if name in run.unreadable:
            faults.append(f"{where}: {name} cannot be used, so nothing proves what it used: {run.unreadable[name]}")
        elif expects_rollouts(run, view):
            faults.append(f"{where}: {name} is missing, so nothing proves what it used")
        return faults
    if "data_digest" not in detail:
        return faults
    if rollouts.digest != detail["data_digest"]:
        faults.append(
            f"{where}: rollouts/step_{row.step:06d}.parquet is not what was trained on: its digest is "
            f"{rollouts.digest[:16]}, the trainer's {detail['data_digest'][:16]}"
        )
    faults += [f"{where}: {fault}" for fault in rollouts.faults]
    logged, recorded = set(rollouts.prompts), {str(item.prompt_id) for item in view.prompts}
    if logged != recorded:
        odd = sorted(logged ^ recorded)
        faults.append(f"{where}: its rollout log and the ledger differ in prompts {', '.join(odd[:3])}")
    pairs = [("trajectories", rollouts.num_usable, detail["trajectories"])]
    if not detail["optimizer_steps_skipped"]:
        pairs.append(("loss tokens", tokens_in_loss(run, view), detail["loss_tokens"]))
    faults += [
        f"{where}: {name} are {counted} in the rollout log, {told} in the ledger"
        for name, counted, told in pairs
        if counted != told
    ]
    return faults
