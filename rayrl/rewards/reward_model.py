"""The score of a reward model, which an actor of its own hosts."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from rayrl.config import reward as config
from rayrl.errors import RewardError
from rayrl.rewards.result import checked_result
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import Reward, RewardResult


class TextScorer(Protocol):
    """A reward model as a reward sees it."""

    async def score(self, prompt: Prompt, completion: str) -> float:
        """Return the score of a completion. ActorError or DeadlineExceeded if its actor does not answer."""
        ...


@runtime_checkable
class ScoredReward(Reward, Protocol):
    """A reward that asks reward models, or has a term that does."""

    def connect(self, scorers: Mapping[str, TextScorer]) -> None:
        """Ask these from now on; keys are the paths of the reward models."""
        ...


class RewardModelReward:
    """Asks the reward model of `reward.path`; it must be connected before the first score."""

    def __init__(self, settings: config.RewardModelReward) -> None:
        self._settings = settings
        self._scorer: TextScorer | None = None

    def connect(self, scorers: Mapping[str, TextScorer]) -> None:
        """See `ScoredReward`."""
        self._scorer = scorers[self._settings.path]

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        """Return the model's score. RewardError if it is not finite; the scorer's errors as they are."""
        where = f"reward model {self._settings.path!r} on prompt {prompt.id}"
        if self._scorer is None:
            raise RewardError(f"{where}: no actor hosts it; only runs started by the driver have one")
        return checked_result(await self._scorer.score(prompt, completion), where)
