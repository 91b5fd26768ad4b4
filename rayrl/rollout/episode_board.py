"""What each running episode does at the moment: sampling, scoring, or something of its own workflow."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rayrl.types.prompt import Prompt, PromptId
from rayrl.types.protocols import EpisodeContext, Reward, RewardResult, Sampler
from rayrl.types.sampling import Completion, SamplingParams

Stage = Literal["workflow", "sampling", "scoring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeState:
    """One running episode.

    Example: `EpisodeState(episode="sums/0/3#1", stage="scoring", stage_s=12.5, episode_s=14.0, calls=1)`.
    """

    episode: str
    """Prompt id and sample index."""
    stage: Stage
    """`workflow` is whatever the workflow does between samples and scores: its tools, its environment."""
    stage_s: float
    """Seconds in this stage."""
    episode_s: float
    """Seconds since the episode began."""
    calls: int
    """Samples and scores asked for so far."""


class EpisodeBoard:
    """The running episodes of one rollout worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    @contextmanager
    def episode(self, prompt_id: PromptId, sample_index: int, context: EpisodeContext) -> Iterator[EpisodeContext]:
        """Show an episode while the body runs, which must use the context that is yielded."""
        name = f"{prompt_id}#{sample_index}"
        entry = self._entries[name] = _Entry(self._clock)
        try:
            yield dataclasses.replace(
                context, sampler=_ShownSampler(context.sampler, entry), reward=_ShownReward(context.reward, entry)
            )
        finally:
            del self._entries[name]

    def __len__(self) -> int:
        return len(self._entries)

    def oldest(self, count: int) -> tuple[EpisodeState, ...]:
        """Return the episodes that are longest in their stage, at most `count`."""
        now = self._clock()
        states = [
            EpisodeState(
                episode=name,
                stage=entry.stage,
                stage_s=now - entry.since,
                episode_s=now - entry.started,
                calls=entry.calls,
            )
            for name, entry in self._entries.items()
        ]
        return tuple(sorted(states, key=lambda state: -state.stage_s)[:count])


class _Entry:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.started = self.since = clock()
        self.stage: Stage = "workflow"
        self.calls = 0

    @contextmanager
    def during(self, stage: Stage) -> Iterator[None]:
        self.calls += 1
        self.stage, self.since = stage, self._clock()
        try:
            yield
        finally:
            self.stage, self.since = "workflow", self._clock()


class _ShownSampler:
    def __init__(self, sampler: Sampler, entry: _Entry) -> None:
        self._sampler = sampler
        self._entry = entry

    async def sample(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        with self._entry.during("sampling"):
            return await self._sampler.sample(prompt_tokens, params, session_id=session_id)


class _ShownReward:
    def __init__(self, reward: Reward, entry: _Entry) -> None:
        self._reward = reward
        self._entry = entry

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        with self._entry.during("scoring"):
            return await self._reward.score(prompt, completion)
