"""How completions are scored: one class per reward, chosen by `type`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rayrl.config.base import Section
from rayrl.config.frozen import FrozenModelSection


class ExactMatchReward(Section):
    """1 if the completion equals the answer, else 0."""

    type: Literal["exact_match"]
    strip: bool = True
    """Ignore white space around both."""
    ignore_case: bool = False
    """Compare without regard to case."""


class RegexReward(Section):
    """1 if the pattern is found and, where it has a group, its last match equals the answer."""

    type: Literal["regex"]
    pattern: str
    """Python regular expression; with a group, the last match of group 1 is compared with the answer."""


class ReasoningGymReward(Section):
    """The verifier of the reasoning-gym task that made the prompt."""

    type: Literal["reasoning_gym"]
    extract: Literal["text", "last_number", "answer_tag"] = "last_number"
    """What of the completion is scored: all of it, the last number in it, or the content of `<answer>`."""


class MathReward(Section):
    """1 if math-verify finds the answer equal. Runs in a killable process."""

    type: Literal["math"]
    timeout_s: float = Field(default=10.0, gt=0)
    """Time for one completion; after it the process is killed and the reward has failed."""


class FunctionReward(Section):
    """A function of yours: `(prompt: Prompt, completion: str) -> float | RewardResult`, sync or async."""

    type: Literal["function"]
    path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`module:function`; must be importable in the rollout workers."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time for one completion."""


class RewardModelReward(FrozenModelSection):
    """The score of a reward model, as `rayrl reward-model` exports it. An actor of its own hosts the model."""

    type: Literal["reward_model"]
    prompt_format: Literal["chat", "text"] = "chat"
    """As in the training of the reward model."""
    system_prompt: str | None = None
    """System message in front of chat prompts."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time for one score; after it the episode is tried again, as for a lost engine."""
    max_batch_size: int = Field(default=64, gt=0)
    """Most completions that are scored at once."""


class WeightedReward(Section):
    """One term of a weighted sum."""

    name: str = Field(pattern=r"^\w+$")
    """Name of the part in metrics."""
    weight: float = 1.0
    """Factor of this term."""
    reward: "RewardConfig"
    """Any reward."""


class WeightedSumReward(Section):
    """Sum of weighted rewards; each term is reported apart."""

    type: Literal["weighted_sum"]
    terms: tuple[WeightedReward, ...] = Field(min_length=1)
    """The terms."""


RewardConfig = Annotated[
    ExactMatchReward
    | RegexReward
    | ReasoningGymReward
    | MathReward
    | FunctionReward
    | RewardModelReward
    | WeightedSumReward,
    Field(discriminator="type"),
]
WeightedReward.model_rebuild()


def reward_models(*rewards: RewardConfig | None) -> tuple[RewardModelReward, ...]:
    """Return the reward models that these rewards ask, terms of sums included, one for each path."""
    found: dict[str, RewardModelReward] = {}
    for reward in rewards:
        if isinstance(reward, RewardModelReward):
            found.setdefault(reward.path, reward)
        elif isinstance(reward, WeightedSumReward):
            found |= {model.path: model for model in reward_models(*(term.reward for term in reward.terms))}
    return tuple(found.values())
