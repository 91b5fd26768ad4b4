"""The board of running episodes: who is longest in which stage."""

from typing import Any

import pytest

from rayrl.rollout.episode_board import EpisodeBoard
from rayrl.types.prompt import PromptId
from rayrl.types.protocols import EpisodeContext

PROMPT = PromptId(dataset="sums", epoch=0, ordinal=3)
UNUSED: Any = None


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Probe:
    """A sampler and a reward that look at the board while they are called."""

    def __init__(self, board: EpisodeBoard, clock: Clock, error: Exception | None = None) -> None:
        self.seen: list[tuple[str, str, float]] = []
        self._board = board
        self._clock = clock
        self._error = error

    async def sample(self, prompt_tokens: Any, params: Any, *, session_id: str | None = None) -> Any:
        self._look()

    async def score(self, prompt: Any, completion: str) -> Any:
        self._look()
        if self._error is not None:
            raise self._error

    def _look(self) -> None:
        self._clock.now += 5.0
        self.seen += [(state.episode, state.stage, state.stage_s) for state in self._board.oldest(9)]


def context(probe: Probe) -> EpisodeContext:
    return EpisodeContext(sampler=probe, reward=probe, tokenizer=UNUSED, params=UNUSED, max_context=8)


@pytest.mark.asyncio
async def test_stages_of_an_episode_are_shown_while_they_last() -> None:
    clock = Clock()
    board = EpisodeBoard(clock)
    probe = Probe(board, clock)

    with board.episode(PROMPT, 1, context(probe)) as shown:
        await shown.sampler.sample((1,), UNUSED)
        await shown.reward.score(UNUSED, "7")
        clock.now += 3.0
        (between,) = board.oldest(1)

    assert probe.seen == [("sums/0/3#1", "sampling", 5.0), ("sums/0/3#1", "scoring", 5.0)]
    assert (between.stage, between.stage_s, between.episode_s, between.calls) == ("workflow", 3.0, 13.0, 2)
    assert len(board) == 0


@pytest.mark.asyncio
async def test_episode_that_fails_leaves_its_stage_and_the_board() -> None:
    clock = Clock()
    board = EpisodeBoard(clock)
    probe = Probe(board, clock, error=ValueError("no"))

    with pytest.raises(ValueError, match="no"), board.episode(PROMPT, 0, context(probe)) as shown:
        await shown.reward.score(UNUSED, "7")

    assert len(board) == 0


def test_episodes_longest_in_their_stage_come_first() -> None:
    clock = Clock()
    board = EpisodeBoard(clock)
    probe = Probe(board, clock)
    with board.episode(PROMPT, 0, context(probe)):
        clock.now += 1.0
        with board.episode(PROMPT, 1, context(probe)), board.episode(PROMPT, 2, context(probe)):
            clock.now += 1.0
            assert [state.episode for state in board.oldest(2)] == ["sums/0/3#0", "sums/0/3#1"]
