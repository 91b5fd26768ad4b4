"""Was any token trained on that is older than the bound? Counted anew from the version of each token."""

from rayrl.audit.finding import Finding, judge
from rayrl.audit.run_record import RunRecord
from rayrl.audit.step_view import StepView, step_views, tokens_in_loss


def check_ages(run: RunRecord) -> Finding:
    """Return whether no token older than `driver.max_staleness` carried loss, and none came from the future."""
    driver = run.config.driver
    violations = [fault for view in step_views(run) if not view.is_skipped for fault in _age_faults(run, view)]
    what = "was masked" if driver.on_stale == "mask" else "was dropped with its group"
    claim = f"every token older than {driver.max_staleness} versions {what} before it was trained on"
    if driver.on_stale == "keep":
        claim = "no token is newer than the weights that were trained (on_stale: keep bounds no age)"
    return judge("ages", claim, violations, _missing(run))


def _missing(run: RunRecord) -> str:
    if not run.config.tracking.rollout_log:
        return "the version of each token: tracking.rollout_log is off"
    for view in step_views(run):
        if view.rollouts is None:
            name = f"rollouts/step_{view.row.step:06d}.parquet"
            why = f"{name} cannot be used" if name in run.unreadable else f"{name} is missing"
            return f"the version of each token of step {view.row.step}: {why}"
    return ""


def _age_faults(run: RunRecord, view: StepView) -> list[str]:
    rollouts, driver, where = view.rollouts, run.config.driver, f"step {view.row.step}"
    if rollouts is None:
        return []
    faults = []
    newer = sum(count for version, count in rollouts.tokens_by_version.items() if version > view.started_from)
    if newer:
        faults.append(f"{where}: {newer} tokens were sampled by versions after {view.started_from}, which it trained")
    bound = view.started_from - driver.max_staleness
    stale = {version: count for version, count in rollouts.tokens_by_version.items() if version < bound}
    if not stale or driver.on_stale == "keep":
        return faults
    told = f"{where}: {sum(stale.values())} tokens of version {min(stale)} and up are older than {bound}"
    if driver.on_stale == "drop":
        return [*faults, f"{told}, their groups should have been dropped"]
    recorded, counted = view.row.detail.get("loss_tokens"), tokens_in_loss(run, view)
    if recorded is not None and recorded > counted and not view.row.detail.get("optimizer_steps_skipped"):
        faults.append(f"{told} and {recorded - counted} of them carried loss")
    return faults
