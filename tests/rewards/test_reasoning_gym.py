import pickle
from collections.abc import Callable

import pytest
from reasoning_gym import create_dataset

from rayrl.config.reward import ReasoningGymReward
from rayrl.errors import RewardError
from rayrl.rewards.reasoning_gym import extract_answer
from rayrl.rewards.registry import make_reward
from rayrl.types.prompt import Prompt, PromptId

MakePrompt = Callable[..., Prompt]


def _gym_prompt(task: str, **settings: int) -> Prompt:
    """As `rayrl.datasets.reasoning_gym` makes them, through the pickling that they meet on the way."""
    entry = create_dataset(task, size=1, seed=1, **settings)[0]
    prompt = Prompt(
        id=PromptId(dataset=task, epoch=0, ordinal=0),
        text=entry["question"],
        answer=entry["answer"],
        metadata={"task": task, "settings": {"size": 1, "seed": 1, **settings}, "entry": repr(entry)},
    )
    loaded: Prompt = pickle.loads(pickle.dumps(prompt))
    return loaded


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("16 - 5 = 11.", "11"),
        ("the result is -7", "-7"),
        ("the result is \N{MINUS SIGN}7", "-7"),
        ("5-3", "3"),
        ("(2)-3", "3"),
        ("16--5", "-5"),
        ("about 1,234,567.50 dollars", "1234567.50"),
        ("either 3,4", "4"),
        ("1,0000", "0000"),
        ("it is .5", ".5"),
        ("1. first\n2. then 9!", "9"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number_is_found(completion: str, expected: str | None) -> None:
    assert extract_answer(completion, "last_number") == expected


def test_answer_tag_and_text_are_found() -> None:
    tagged = "<answer>1</answer> wait <answer>\n 2 b\n</answer> done"
    assert extract_answer(tagged, "answer_tag") == "2 b"
    assert extract_answer("2", "answer_tag") is None
    assert extract_answer(" 2 b\n", "text") == "2 b"


@pytest.mark.asyncio
async def test_completion_is_scored_by_the_task() -> None:
    reward = make_reward(ReasoningGymReward(type="reasoning_gym"))
    prompt = _gym_prompt("chain_sum", min_terms=2, max_terms=2, min_digits=2, max_digits=2)
    assert (await reward.score(prompt, f"It is {prompt.answer}.")).total == 1.0
    assert (await reward.score(prompt, "It is 123456.")).total == 0.0
    assert (await reward.score(prompt, "I do not know.")).total == 0.0


@pytest.mark.asyncio
async def test_task_that_compares_tuples_gives_full_score_to_its_own_answer() -> None:
    reward = make_reward(ReasoningGymReward(type="reasoning_gym", extract="answer_tag"))
    prompt = _gym_prompt("rearc")
    assert (await reward.score(prompt, f"<answer>{prompt.answer}</answer>")).total == 1.0


@pytest.mark.asyncio
async def test_prompt_of_another_dataset_is_an_error(make_prompt: MakePrompt) -> None:
    reward = make_reward(ReasoningGymReward(type="reasoning_gym"))
    with pytest.raises(RewardError, match=r"sums/0/9: its metadata has no 'task'; set dataset\.type: reasoning_gym"):
        await reward.score(make_prompt(), "42")


@pytest.mark.asyncio
async def test_verifier_that_raises_is_an_error_and_not_a_zero(make_prompt: MakePrompt) -> None:
    reward = make_reward(ReasoningGymReward(type="reasoning_gym"))
    prompt = make_prompt(metadata={"task": "chain_sum", "settings": {"size": 1, "seed": 1}, "entry": "{}"})
    with pytest.raises(RewardError, match="sums/0/9 failed on '42': KeyError"):
        await reward.score(prompt, "42")
