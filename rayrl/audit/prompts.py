"""Has every prompt of every finished epoch exactly one outcome, and every group that was not trained a reason?"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rayrl.audit.finding import Finding, judge
from rayrl.audit.run_record import RunRecord
from rayrl.audit.step_view import ended_in_order, step_views
from rayrl.checkpoint.ledger import REWIND
from rayrl.checkpoint.ledger_events import DROPPED_STALE, RUN_ENDED, RUN_STARTED, TRAINING_REBUILT
from rayrl.checkpoint.ledger_reader import EventRow
from rayrl.types.prompt import PromptId


def check_prompts(run: RunRecord) -> Finding:
    """Return whether no prompt has two outcomes, and none was lost.

    Prompts that were out when the run ended are sampled again when it goes on; there are at most
    `(max_staleness + 1) * groups_per_step` of them, and none when a run that ended in order says so.
    """
    live = Counter(row.prompt_id for row in run.ledger.live_prompts)
    violations = [f"prompt {name} has {count} outcomes" for name, count in sorted(live.items()) if count > 1]
    violations += _trained_twice(run)
    length = _prompts_per_epoch(run)
    if length is None:
        return judge("prompts", _claim(0), violations, "the number of prompts in an epoch, which no record has")
    violations += [f"prompt {name} is beyond the {length} of an epoch" for name in live if name.ordinal >= length]
    violations += _lost(run, set(live), length) + _frontier_faults(run, set(live), length)
    return judge("prompts", _claim(finished_epochs(set(live), length)), violations)


def check_outcomes(run: RunRecord) -> Finding:
    """Return whether every group that was sampled and not trained has a reason, and every dropped one came back."""
    violations = [
        f"prompt {row.prompt_id} was {row.outcome} in step {row.step} without a reason"
        for row in run.ledger.live_prompts
        if row.outcome != "trained" and not row.reason
    ]
    if ended_in_order(run):
        state = run.ledger.events[-1].detail["dataset"]
        settled = {str(row.prompt_id) for row in run.ledger.live_prompts}
        violations += [
            f"group {name} was dropped ({event.kind}) in step {event.step} and has no outcome"
            for event in run.ledger.events
            for name in _dropped(event)
            if name not in settled and _place(PromptId.parse(name), state["length"]) < _accounted(state)[0]
        ]
    return judge("outcomes", "every group that was filtered, given up or dropped is accounted for", violations)


def _dropped(event: EventRow) -> list[str]:
    """Return the prompts of finished groups that an event took out of the run without an outcome."""
    if event.kind == DROPPED_STALE:
        return [event.detail["prompt_id"]]
    return list(event.detail["groups_lost"]) if event.kind == TRAINING_REBUILT else []


def finished_epochs(live: set[PromptId], length: int) -> int:
    """Return how many epochs from the first on have an outcome for each prompt."""
    per_epoch = Counter(name.epoch for name in live)
    epoch = 0
    while per_epoch[epoch] >= length:
        epoch += 1
    return epoch


def _claim(num_finished: int) -> str:
    return f"every prompt has at most one outcome, and exactly one in each finished epoch ({num_finished} finished)"


def _trained_twice(run: RunRecord) -> list[str]:
    seen: dict[str, int] = {}
    faults = []
    for view in step_views(run):
        if view.rollouts is None or view.is_skipped:
            continue
        for name, rows in view.rollouts.prompts.items():
            if name in seen:
                faults.append(f"prompt {name} is in the rollout logs of steps {seen[name]} and {view.row.step}")
            elif rows != run.config.rollout.group_size:
                faults.append(f"step {view.row.step}: group {name} has {rows} rows in the rollout log")
            seen[name] = view.row.step
    return faults


def _prompts_per_epoch(run: RunRecord) -> int | None:
    states = [event.detail["dataset"] for event in run.ledger.events if event.kind in (RUN_STARTED, RUN_ENDED)]
    states += [state.dataset_state for state in run.checkpoints.values()]
    return int(states[0]["length"]) if states else None


def _lost(run: RunRecord, live: set[PromptId], length: int) -> list[str]:
    """A prompt without an outcome before the last one that has one is out, or lost."""
    places = {_place(name, length) for name in live}
    gaps = [place for place in range(max(places, default=-1)) if place not in places]
    driver = run.config.driver
    bound = (driver.max_staleness + 1) * driver.groups_per_step
    if ended_in_order(run):
        bound = min(bound, run.ledger.events[-1].detail.get("outstanding", bound))
    if len(gaps) <= bound:
        return []
    names = ", ".join("/".join(map(str, divmod(place, length))) for place in gaps[:3])
    return [f"{len(gaps)} prompts have no outcome though later ones do, at most {bound} can be out: {names}, ..."]


def _frontier_faults(run: RunRecord, live: set[PromptId], length: int) -> list[str]:
    """What the prompt stream took as accounted for must be what the ledger has."""
    faults = []
    places = {_place(name, length) for name in live}
    if ended_in_order(run):
        faults += _compare("the end of the run", run.ledger.events[-1].detail["dataset"], places, length)
    for name, state in run.checkpoints.items():
        before = {
            _place(row.prompt_id, length)
            for row in run.ledger.live_prompts
            if row.stamp.position <= state.ledger_position
        }
        if state.ledger_position <= run.ledger.position and _is_current(run, state.ledger_position):
            faults += _compare(f"checkpoints/{name}", state.dataset_state, before, length)
    return faults


def _is_current(run: RunRecord, position: int) -> bool:
    """Whether no later rewind went back behind a position: the checkpoint is of the history that counts."""
    return not any(
        event.kind == REWIND and event.position > position and event.detail["position"] < position
        for event in run.ledger.events
    )


def _compare(where: str, state: Mapping[str, Any], places: set[int], length: int) -> list[str]:
    frontier, ahead = _accounted(state)
    skipped = [place for place in range(frontier) if place not in places]
    skipped += sorted(ahead - places)
    extra = sorted(place for place in places if place >= frontier and place not in ahead)
    faults = []
    if skipped:
        first = "/".join(map(str, divmod(skipped[0], length)))
        faults.append(f"{where}: {len(skipped)} prompts count as done and have no outcome, the first is {first}")
    if extra:
        first = "/".join(map(str, divmod(extra[0], length)))
        faults.append(f"{where}: {len(extra)} prompts have an outcome and do not count as done, the first is {first}")
    return faults


def _accounted(state: Mapping[str, Any]) -> tuple[int, set[int]]:
    length = state["length"]
    epoch, ordinal = state["frontier"]
    return epoch * length + ordinal, {epoch * length + ordinal for epoch, ordinal in state["accounted_ahead"]}


def _place(name: PromptId, length: int) -> int:
    return name.epoch * length + name.ordinal
