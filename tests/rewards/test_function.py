import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayrl.config.reward import FunctionReward
from rayrl.errors import ConfigError, EngineError, RewardError
from rayrl.rewards.registry import check_reward, make_reward
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import RewardResult

MakePrompt = Callable[..., Prompt]

_MODULE = """
import asyncio, threading
from rayrl.errors import EngineError
from rayrl.types.protocols import RewardResult

release = threading.Event()
NUMBER = 3

def length(prompt, completion, scale=1.0):
    return len(completion) * scale

async def graded(prompt, completion):
    await asyncio.sleep(0)
    return {"total": 0.5, "thread": float(threading.current_thread() is threading.main_thread())}

def result(prompt, completion):
    return RewardResult(total=2.0, parts={"same": float(prompt.answer == completion)})

class Judge:
    async def __call__(self, prompt, completion):
        return 0.75

judge = Judge()

def nothing(prompt, completion):
    return None

def raises(prompt, completion):
    raise KeyError("oh")

def stops(prompt, completion):
    raise StopIteration("end")

def leaves(prompt, completion):
    exit(3)

def engine_down(prompt, completion):
    raise EngineError("no engine")

def own_timeout(prompt, completion):
    raise TimeoutError("http 504")

def hangs(prompt, completion):
    release.wait()
    return 1.0

async def waits(prompt, completion):
    await asyncio.Event().wait()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "user_rewards_of_test"
    (tmp_path / f"{name}.py").write_text(_MODULE)
    (tmp_path / "user_rewards_broken.py").write_text("1 / 0\n")
    (tmp_path / "user_rewards_leaving.py").write_text("exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    import sys

    loaded = sys.modules.pop(name, None)
    if loaded is not None:
        loaded.release.set()


def _reward(module: str, function: str, **options: Any) -> Any:
    return make_reward(FunctionReward(type="function", path=f"{module}:{function}", **options))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("length", RewardResult(total=2.0)),
        ("graded", RewardResult(total=0.5, parts={"thread": 1.0})),
        ("result", RewardResult(total=2.0, parts={"same": 1.0})),
        ("judge", RewardResult(total=0.75)),
    ],
)
async def test_function_may_return_number_dict_or_result(
    make_prompt: MakePrompt, module: str, function: str, expected: RewardResult
) -> None:
    assert await _reward(module, function).score(make_prompt("42"), "42") == expected


@pytest.mark.asyncio
async def test_params_become_keyword_arguments(make_prompt: MakePrompt, module: str) -> None:
    assert (await _reward(module, "length", params={"scale": 0.5}).score(make_prompt(), "abcd")).total == 2.0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", r"'user_rewards_of_test:raises' on prompt sums/0/9 failed: KeyError: 'oh'"),
        ("leaves", "failed: RuntimeError: SystemExit: 3"),
        ("stops", "failed: RuntimeError: StopIteration: end"),
        ("own_timeout", "failed: TimeoutError: http 504"),
        ("nothing", "returned NoneType None, not a number"),
    ],
)
async def test_failing_function_is_an_error_with_type_and_message(
    make_prompt: MakePrompt, module: str, function: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        await _reward(module, function).score(make_prompt(), "42")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.asyncio
async def test_fault_of_the_infrastructure_stays_one(make_prompt: MakePrompt, module: str) -> None:
    with pytest.raises(EngineError, match="no engine"):
        await _reward(module, "engine_down").score(make_prompt(), "42")


@pytest.mark.asyncio
@pytest.mark.parametrize("function", ["hangs", "waits"])
async def test_function_that_takes_too_long_names_the_setting(
    make_prompt: MakePrompt, module: str, function: str
) -> None:
    with pytest.raises(RewardError, match=r"took longer than reward\.timeout_s=0\.01"):
        await _reward(module, function, timeout_s=0.01).score(make_prompt(), "42")


@pytest.mark.asyncio
async def test_hanging_calls_do_not_block_later_ones(make_prompt: MakePrompt, module: str) -> None:
    hanging, quick = _reward(module, "hangs", timeout_s=0.01), _reward(module, "length")
    results = await asyncio.gather(*(hanging.score(make_prompt(), "x") for _ in range(100)), return_exceptions=True)
    assert all(isinstance(result, RewardError) for result in results)
    assert (await quick.score(make_prompt(), "abc")).total == 3.0
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "rayrl-call")


@pytest.mark.parametrize(
    ("path", "params", "message"),
    [
        ("no_such_module_of_test:f", {}, "cannot import module 'no_such_module_of_test'"),
        ("user_rewards_broken:f", {}, "cannot import module 'user_rewards_broken' .*: ZeroDivisionError"),
        ("user_rewards_leaving:f", {}, "cannot import module 'user_rewards_leaving' .*: SystemExit: 3"),
        ("user_rewards_of_test:lenght", {}, "has no 'lenght'; it has .*length"),
        ("user_rewards_of_test:NUMBER", {}, "is a int, not a function"),
        ("user_rewards_of_test:length", {"factor": 2}, r"cannot be called with \(prompt, completion, factor=\.\.\.\)"),
    ],
)
def test_function_that_cannot_be_used_is_a_config_error(
    module: str, path: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.path.*{message}"):
        check_reward(FunctionReward(type="function", path=path, params=params))
