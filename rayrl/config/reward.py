"""How completions are scored: one class per reward, chosen by `type`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rayrl.config.base import Section


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
    ExactMatchReward | RegexReward | ReasoningGymReward | MathReward | FunctionReward | WeightedSumReward,
    Field(discriminator="type"),
]
WeightedReward.model_rebuild()
