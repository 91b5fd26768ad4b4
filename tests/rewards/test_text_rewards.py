"""exact_match, regex, weighted_sum, the registry, and the check of results."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest

from rayrl.config.reward import ExactMatchReward, RegexReward, RewardConfig, WeightedSumReward
from rayrl.errors import ConfigError, RewardError
from rayrl.rewards.closable import ClosableReward
from rayrl.rewards.registry import REWARDS, check_reward, close_reward, make_reward
from rayrl.rewards.result import checked_result
from rayrl.rewards.weighted_sum import Term
from rayrl.rewards.weighted_sum import WeightedSumReward as WeightedSum
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import RewardResult

MakePrompt = Callable[..., Prompt]


class ConstantReward:
    """Gives one result, or raises one error; counts closes."""

    def __init__(self, result: RewardResult | Exception) -> None:
        self._result = result
        self.num_closes = 0

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    async def close(self) -> None:
        self.num_closes += 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "completion", "expected"),
    [
        ({}, " 42\n", 1.0),
        ({}, "42.", 0.0),
        ({}, "", 0.0),
        ({"strip": False}, "42 ", 0.0),
        ({"strip": False}, "42", 1.0),
    ],
)
async def test_exact_match_compares_whole_texts(
    make_prompt: MakePrompt, options: dict[str, Any], completion: str, expected: float
) -> None:
    reward = make_reward(ExactMatchReward(type="exact_match", **options))
    assert await reward.score(make_prompt("42"), completion) == RewardResult(total=expected)


@pytest.mark.asyncio
async def test_exact_match_heeds_case_unless_told_otherwise(make_prompt: MakePrompt) -> None:
    strict = make_reward(ExactMatchReward(type="exact_match"))
    lenient = make_reward(ExactMatchReward(type="exact_match", ignore_case=True))
    assert (await strict.score(make_prompt("Paris"), "paris")).total == 0.0
    assert (await lenient.score(make_prompt("Paris"), "paris")).total == 1.0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("pattern", "completion", "expected"),
    [
        (r"<think>.*</think>", "<think>so</think> 7", 1.0),
        (r"<think>.*</think>", "7", 0.0),
        (r"answer: (\d+)", "answer: 7, no, answer: 42", 1.0),
        (r"answer: (\d+)", "answer: 42, no, answer: 7", 0.0),
        (r"answer:(.*)", "answer: 42 ", 1.0),
        (r"answer: (\d+)", "42", 0.0),
        (r"yes|(\d+)", "42 yes", 0.0),
    ],
)
async def test_regex_scores_presence_or_the_last_group(
    make_prompt: MakePrompt, pattern: str, completion: str, expected: float
) -> None:
    reward = make_reward(RegexReward(type="regex", pattern=pattern))
    assert (await reward.score(make_prompt("42"), completion)).total == expected


def test_regex_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"reward\.pattern '\(' is not a regular expression"):
        check_reward(RegexReward(type="regex", pattern="("))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "config", [ExactMatchReward(type="exact_match"), RegexReward(type="regex", pattern=r"(\d+)")], ids=lambda c: c.type
)
async def test_missing_answer_is_an_error_that_names_the_prompt(make_prompt: MakePrompt, config: RewardConfig) -> None:
    with pytest.raises(RewardError, match=rf"'{config.type}' .*prompt sums/0/9 has none; set dataset\.answer_field"):
        await make_reward(config).score(make_prompt(None), "42")


@pytest.mark.asyncio
async def test_regex_without_group_needs_no_answer(make_prompt: MakePrompt) -> None:
    reward = make_reward(RegexReward(type="regex", pattern="a+"))
    assert (await reward.score(make_prompt(None), "baa")).total == 1.0


@pytest.mark.asyncio
async def test_weighted_sum_adds_terms_and_reports_each(make_prompt: MakePrompt) -> None:
    config = WeightedSumReward.model_validate(
        {
            "type": "weighted_sum",
            "terms": [
                {"name": "answer", "reward": {"type": "regex", "pattern": r"(\d+)$"}},
                {"name": "format", "weight": 0.25, "reward": {"type": "regex", "pattern": "^<"}},
            ],
        }
    )
    result = await make_reward(config).score(make_prompt("42"), "< 42")
    assert result == RewardResult(total=1.25, parts={"answer": 1.0, "format": 1.0})


@pytest.mark.asyncio
async def test_weighted_sum_names_the_parts_of_its_terms(make_prompt: MakePrompt) -> None:
    inner = ConstantReward(RewardResult(total=2.0, parts={"style": 0.5}))
    result = await WeightedSum([Term(name="judge", weight=-1.0, reward=inner)]).score(make_prompt(), "")
    assert result == RewardResult(total=-2.0, parts={"judge": 2.0, "judge/style": 0.5})


@pytest.mark.asyncio
@pytest.mark.parametrize("result", [RewardError("broken"), RewardResult(total=math.nan)], ids=["raises", "nan"])
async def test_weighted_sum_fails_when_a_term_fails(make_prompt: MakePrompt, result: RewardResult | Exception) -> None:
    terms = [
        Term(name="good", weight=1.0, reward=ConstantReward(RewardResult(total=1.0))),
        Term(name="bad", weight=0.0, reward=ConstantReward(result)),
    ]
    with pytest.raises(RewardError, match="term 'bad'"):
        await WeightedSum(terms).score(make_prompt(), "")


def test_weighted_sum_refuses_two_terms_of_one_name() -> None:
    term = Term(name="a", weight=1.0, reward=ConstantReward(RewardResult(total=1.0)))
    with pytest.raises(ConfigError, match=r"more than one term named \['a'\]"):
        WeightedSum([term, term])


@pytest.mark.asyncio
async def test_closing_a_weighted_sum_closes_its_terms() -> None:
    owner = ConstantReward(RewardResult(total=1.0))
    plain = make_reward(ExactMatchReward(type="exact_match"))
    reward = WeightedSum([Term(name="a", weight=1.0, reward=owner), Term(name="b", weight=1.0, reward=plain)])
    assert isinstance(reward, ClosableReward)
    assert not isinstance(plain, ClosableReward)
    await close_reward(reward)
    await close_reward(plain)
    assert owner.num_closes == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, RewardResult(total=1.0)),
        (True, RewardResult(total=1.0)),
        ({"total": 0.5, "format": 1}, RewardResult(total=0.5, parts={"format": 1.0})),
        (RewardResult(total=2.0, parts={"a": 1.0}), RewardResult(total=2.0, parts={"a": 1.0})),
    ],
)
def test_numbers_dicts_and_results_are_accepted(value: Any, expected: RewardResult) -> None:
    assert checked_result(value, "it") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "it returned NoneType None, not a number"),
        ("1.0", "it returned str '1.0', not a number"),
        ([1.0], "not a number"),
        (math.inf, "it returned inf, which is not finite"),
        ({"score": 1.0}, r"without 'total'; it has \['score'\]"),
        ({"total": 1.0, "a": math.nan}, "part 'a', returned nan"),
        (RewardResult(total=math.nan), "nan, which is not finite"),
    ],
)
def test_anything_else_is_a_failed_reward(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        checked_result(value, "it")


def test_every_reward_type_of_the_config_can_be_made() -> None:
    types = {get_args(section.model_fields["type"].annotation)[0] for section in get_args(get_args(RewardConfig)[0])}
    assert set(REWARDS) == types


def test_importing_the_rewards_loads_no_heavy_library() -> None:
    code = (
        "import sys, rayrl.rewards.registry;"
        "print([name for name in ('torch', 'reasoning_gym', 'math_verify', 'sympy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
