"""A weighted sum of rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayrl.errors import ConfigError, RewardError
from rayrl.rewards.closable import ClosableReward
from rayrl.rewards.result import checked_result
from rayrl.rewards.reward_model import ScoredReward, TextScorer
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import Reward, RewardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of the sum."""

    name: str
    weight: float
    reward: Reward


class WeightedSumReward:
    """total = sum of weight * total of the term. Raises ConfigError if two terms have one name."""

    def __init__(self, terms: Sequence[Term]) -> None:
        names = [term.name for term in terms]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"reward.terms has more than one term named {repeated}; their parts would collide")
        self._terms = tuple(terms)

    def connect(self, scorers: Mapping[str, TextScorer]) -> None:
        """See `ScoredReward`: terms that ask reward models are connected."""
        for term in self._terms:
            if isinstance(term.reward, ScoredReward):
                term.reward.connect(scorers)

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        """Return the sum; each term's total, before its weight, is the part NAME, and its own parts are NAME/PART.

        Raises RewardError if any term fails, naming it: a sum without it would be another reward.
        """
        total = 0.0
        parts: dict[str, float] = {}
        for term in self._terms:
            try:
                result = await term.reward.score(prompt, completion)
            except RewardError as error:
                raise RewardError(f"term {term.name!r}: {error}") from error
            result = checked_result(result, f"term {term.name!r} on prompt {prompt.id}")
            total += term.weight * result.total
            parts[term.name] = result.total
            parts |= {f"{term.name}/{name}": value for name, value in result.parts.items()}
        return checked_result(RewardResult(total=total, parts=parts), f"reward weighted_sum on prompt {prompt.id}")

    async def close(self) -> None:
        """Close the terms that own something."""
        for term in self._terms:
            if isinstance(term.reward, ClosableReward):
                await term.reward.close()
