import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from rayrl.config.reward import MathReward as MathRewardConfig
from rayrl.errors import RewardError
from rayrl.rewards.math import MathReward
from rayrl.rewards.registry import close_reward, make_reward
from rayrl.types.prompt import Prompt

MakePrompt = Callable[..., Prompt]

_NEVER_ENDS = "$" + "9" * 9 + "^{" + "9" * 9 + "}$"
"""Its value has billions of digits."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def reward() -> AsyncIterator[MathReward]:
    made = make_reward(MathRewardConfig(type="math", timeout_s=60.0))
    assert isinstance(made, MathReward)
    yield made
    await close_reward(made)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("12", "3 + 9 = 12.", 1.0),
        ("12", "12 or rather 13", 0.0),
        (r"\frac{1}{2}", "so it is $0.5$", 1.0),
        ("1/2", r"\boxed{\frac{2}{4}}", 1.0),
        ("3x+2", "$2+3x$", 1.0),
        ("3x+2", "2", 0.0),
        (r"$\boxed{7}$", "7", 1.0),
        ("12", "no idea", 0.0),
        ("12", "", 0.0),
    ],
)
async def test_equal_expressions_score_one(
    make_prompt: MakePrompt, reward: MathReward, answer: str, completion: str, expected: float
) -> None:
    assert (await reward.score(make_prompt(answer), completion)).total == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_unreadable_reference_answer_is_an_error(make_prompt: MakePrompt, reward: MathReward) -> None:
    with pytest.raises(RewardError, match=r"sums/0/9 failed: .*finds no expression in the reference answer ''"):
        await reward.score(make_prompt(""), "12")


@pytest.mark.asyncio(loop_scope="module")
async def test_missing_answer_is_an_error(make_prompt: MakePrompt, reward: MathReward) -> None:
    with pytest.raises(RewardError, match="prompt sums/0/9 has none"):
        await reward.score(make_prompt(None), "12")


@pytest.mark.asyncio(loop_scope="module")
async def test_killed_process_is_replaced_without_the_episode_noticing(
    make_prompt: MakePrompt, reward: MathReward
) -> None:
    await reward.score(make_prompt("1"), "1")
    before = reward.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert (await reward.score(make_prompt("12"), "12")).total == 1.0
    assert reward.pid != before


@pytest.mark.asyncio
async def test_problem_that_takes_too_long_is_an_error_and_the_next_one_is_scored(make_prompt: MakePrompt) -> None:
    reward = MathReward(MathRewardConfig(type="math", timeout_s=0.5))
    with pytest.raises(RewardError, match=r"sums/0/9 took longer than reward\.timeout_s=0\.5"):
        await reward.score(make_prompt("12"), _NEVER_ENDS)
    assert reward.pid is None
    await reward.close()
    with pytest.raises(RewardError, match="closed"):
        await reward.score(make_prompt("12"), "12")


@pytest.mark.asyncio
async def test_many_episodes_share_one_process(make_prompt: MakePrompt) -> None:
    reward = MathReward(MathRewardConfig(type="math", timeout_s=60.0))
    results = await asyncio.gather(*(reward.score(make_prompt(str(n)), "it is 3") for n in range(6)))
    assert [result.total for result in results] == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    await reward.close()


@pytest.mark.chaos
def test_worker_that_never_returns_ends_itself_when_nobody_kills_it() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "rayrl.rewards.math_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdin is not None and worker.stdout is not None
    assert worker.stdout.readline() == b"ready\n"
    request = {"answer": "12", "completion": _NEVER_ENDS, "alarm_s": 0.2}
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    worker.stdin.flush()
    assert worker.wait(timeout=60) == -signal.SIGALRM
    worker.stdin.close()
    worker.stdout.close()
