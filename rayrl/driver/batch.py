"""Form a training batch from buffered groups. Pure; the train loop acts on it."""

from dataclasses import dataclass

from rayrl.driver.group_buffer import BufferedGroup
from rayrl.driver.staleness import StaleDecision, StalePolicy, decide, group_age


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Which groups are trained on in one step and what happens to the others that were looked at."""

    chosen: tuple[BufferedGroup, ...]
    """B groups, or fewer if `is_complete` is false, in order of their prompts."""
    dropped: tuple[BufferedGroup, ...]
    """Too old; their prompts go back to the dataset."""
    ages: tuple[int, ...]
    """Age of each chosen group, in versions."""
    num_masked: int
    """Chosen groups with tokens that training will mask."""
    num_kept_stale: int
    """Chosen groups with tokens beyond the bound that are trained on, by `on_stale: keep`."""
    is_complete: bool


def plan_batch(
    groups: list[BufferedGroup], *, version: int, groups_per_step: int, max_staleness: int, on_stale: StalePolicy
) -> BatchPlan:
    """Return the plan for a step at `version`; groups are taken in order of admission, and trained in that of prompts.

    Admission has another order after a resume, where buffered groups come first; sums must not be rounded otherwise.

    Dropping is decided for every buffered group, also beyond the first B: a group that is too old now only gets older.
    """
    chosen: list[BufferedGroup] = []
    dropped: list[BufferedGroup] = []
    decisions: list[StaleDecision] = []
    for group in groups:
        decision = decide(group.summary, version=version, max_staleness=max_staleness, on_stale=on_stale)
        if decision is StaleDecision.DROP:
            dropped.append(group)
        elif len(chosen) < groups_per_step:
            chosen.append(group)
            decisions.append(decision)
    chosen.sort(key=lambda group: (group.summary.prompt_id.epoch, group.summary.prompt_id.ordinal))
    return BatchPlan(
        chosen=tuple(chosen),
        dropped=tuple(dropped),
        ages=tuple(group_age(group.summary, version) for group in chosen),
        num_masked=decisions.count(StaleDecision.MASK),
        num_kept_stale=decisions.count(StaleDecision.KEEP),
        is_complete=len(chosen) == groups_per_step,
    )
