"""What everything waits for when no step comes: the observation, the cause that follows from it, and its text. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayrl.inference.engine import EngineStatus
from rayrl.inference.lifecycle import EngineState
from rayrl.infra.collective_report import CollectiveReport
from rayrl.rollout.episode_board import EpisodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class StallObservation:
    """A run at the moment in which the watchdog looks."""

    step: int
    """Finished steps."""
    stalled_s: float
    """Since the last one, or the start."""
    phase: str
    """What the train loop does."""
    phase_s: float
    """Since when."""
    needed: int
    """Groups of a step."""
    buffered: int
    """Finished groups that wait."""
    rollout: Mapping[str, Any]
    """Status of the rollout loop."""
    engines: Mapping[str, EngineStatus | str]
    """Of each engine, or why it did not answer."""
    queue_limit: int
    """Requests that an engine lets wait."""
    workers: Mapping[str, Mapping[str, Any] | str]
    """Of each rollout worker, or why it did not answer."""
    collectives: CollectiveReport | None
    """Recorded collectives, if any."""
    stacks: Mapping[str, str]
    """Of all threads of each actor."""

    @property
    def episodes(self) -> list[EpisodeState]:
        """The episodes that are longest in their stage."""
        found = [
            state
            for status in self.workers.values()
            if not isinstance(status, str)
            for state in status.get("oldest_episodes", ())
        ]
        return sorted(found, key=lambda state: -state.stage_s)


def name_cause(seen: StallObservation) -> str:
    """Return one sentence on what holds the run up, the most specific that the observation allows."""
    if seen.collectives is not None and seen.collectives.divergence is not None:
        return f"collectives diverge: {seen.collectives.divergence}"
    if not seen.phase.startswith("waiting for"):
        return _cause_in_step(seen)
    silent = [f"{name}: {status}" for name, status in seen.engines.items() if isinstance(status, str)]
    if silent:
        return f"engine does not answer: {'; '.join(silent)}"
    for name, status in seen.engines.items():
        assert not isinstance(status, str), "all have answered"
        if status.failure is not None:
            return f"engine {name} has failed: {status.failure}"
        if status.state is EngineState.PAUSED:
            return (
                f"engine {name} is paused with {status.num_running} running and {status.num_waiting} waiting requests"
            )
    quiet = [f"{name}: {status}" for name, status in seen.workers.items() if isinstance(status, str)]
    if quiet:
        return f"rollout worker does not answer: {'; '.join(quiet)}"
    return _cause_in_episodes(seen) or (
        f"no episode runs and {seen.buffered} of {seen.needed} groups are there: nothing more is admitted; the rollout "
        f"loop says {dict(seen.rollout)}"
    )


def _cause_in_step(seen: StallObservation) -> str:
    """The train loop waits for actors, not for groups."""
    since = f"{seen.phase} goes on for {seen.phase_s:.0f} s"
    if seen.collectives is not None and seen.collectives.last:
        last = "; ".join(f"{name} in {call}" for name, call in sorted(seen.collectives.last.items())[:8])
        return f"{since}; last collectives: {last}"
    return f"{since}; debug.collectives: record would tell in which collective"


def _cause_in_episodes(seen: StallObservation) -> str | None:
    full = [
        name
        for name, status in seen.engines.items()
        if not isinstance(status, str) and status.num_waiting >= seen.queue_limit
    ]
    if full:
        return (
            f"the queue of engine {full[0]} is full: {seen.queue_limit} requests wait, "
            "inference.max_queued_requests allows no more"
        )
    if not seen.episodes:
        return None
    oldest = seen.episodes[0]
    count = sum(state.stage == oldest.stage for state in seen.episodes)
    what = {
        "scoring": "the reward does not return",
        "sampling": "sampling does not end",
        "workflow": "the workflow does not return",
    }[oldest.stage]
    return (
        f"{what}: episode {oldest.episode} is in {oldest.stage} for {oldest.stage_s:.0f} s "
        f"(in all {oldest.episode_s:.0f} s, {oldest.calls} calls), and {count - 1} more of the oldest ones"
    )


def report_text(seen: StallObservation, cause: str) -> str:
    """Return the whole report, for a file."""
    lines = [
        f"no step has finished for {seen.stalled_s:.0f} s; {seen.step} are done",
        f"cause: {cause}",
        "",
        f"train loop: {seen.phase}, for {seen.phase_s:.0f} s; {seen.buffered} of {seen.needed} groups buffered",
        f"rollout loop: {dict(seen.rollout)}",
        *(f"engine {name}: {status}" for name, status in seen.engines.items()),
        *(f"worker {name}: {status}" for name, status in seen.workers.items()),
    ]
    if seen.collectives is not None:
        lines += [f"last collective of {name}: {call}" for name, call in seen.collectives.last.items()]
    for name, stack in seen.stacks.items():
        lines += ["", f"stacks of {name}:", *(f"  {line}" for line in stack.splitlines())]
    return "\n".join(lines) + "\n"
