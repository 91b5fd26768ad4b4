"""Which class makes which `reward.type`."""

from collections.abc import Callable
from typing import Any

from rayrl.config import reward as config
from rayrl.config.reward import RewardConfig
from rayrl.rewards.closable import ClosableReward
from rayrl.rewards.exact_match import ExactMatchReward
from rayrl.rewards.function import FunctionReward
from rayrl.rewards.math import MathReward
from rayrl.rewards.reasoning_gym import ReasoningGymReward
from rayrl.rewards.regex import RegexReward
from rayrl.rewards.reward_model import RewardModelReward
from rayrl.rewards.weighted_sum import Term, WeightedSumReward
from rayrl.types.protocols import Reward


def make_reward(settings: RewardConfig) -> Reward:
    """Return the reward that `settings` describes; no process is started before its first score.

    Raises ConfigError if a function cannot be imported or a pattern is wrong.
    """
    return REWARDS[settings.type](settings)


def check_reward(settings: RewardConfig) -> None:
    """Raise ConfigError if the reward cannot be made."""
    make_reward(settings)


async def close_reward(reward: Reward) -> None:
    """End what the reward owns, if it owns anything."""
    if isinstance(reward, ClosableReward):
        await reward.close()


def _make_weighted_sum(settings: config.WeightedSumReward) -> Reward:
    return WeightedSumReward(
        [Term(name=term.name, weight=term.weight, reward=make_reward(term.reward)) for term in settings.terms]
    )


REWARDS: dict[str, Callable[[Any], Reward]] = {
    "exact_match": ExactMatchReward,
    "regex": RegexReward,
    "reasoning_gym": ReasoningGymReward,
    "math": MathReward,
    "function": FunctionReward,
    "reward_model": RewardModelReward,
    "weighted_sum": _make_weighted_sum,
}
"""A new reward is one file, one config class and one line here."""
