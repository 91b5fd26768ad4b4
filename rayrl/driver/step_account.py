"""What the ledger keeps of a training step beside its outcomes: the denominators, for an audit to count again."""

from collections import Counter
from typing import Any

from rayrl.driver.batch import BatchPlan
from rayrl.training.step import TrainStepResult


def step_account(plan: BatchPlan, result: TrainStepResult, *, version: int) -> dict[str, Any]:
    """Return JSON-able facts of a step that started from `version`.

    Example: `{"trained_version": 6, "groups": 16, "trajectories": 128, "failed_trajectories": 0, "loss_tokens": 1930,
    "stale_tokens": 12, "optimizer_steps_skipped": 0, "group_ages": {"0": 12, "1": 4}, "data_digest": "9f..."}`.
    """
    ages = Counter(plan.ages)
    return {
        "trained_version": version,
        "groups": len(plan.chosen),
        "trajectories": sum(group.summary.num_usable for group in plan.chosen),
        "failed_trajectories": sum(len(group.summary.failures) for group in plan.chosen),
        "loss_tokens": result.num_tokens,
        "stale_tokens": int(result.metrics.get("staleness/stale_tokens", 0)),
        "optimizer_steps_skipped": int(result.metrics.get("train/optimizer_steps_skipped", 0)),
        "group_ages": {str(age): ages[age] for age in sorted(ages)},
        "data_digest": result.data_digest,
    }
