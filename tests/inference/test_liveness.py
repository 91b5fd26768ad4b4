"""Calls to vLLM end when its processes have died: here with a stand-in, in test_vllm_engine.py with the real one."""

import asyncio
from collections.abc import Callable

import pytest

from rayrl.config.inference import InferenceConfig, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.errors import EngineError
from rayrl.inference.lifecycle import EngineState
from rayrl.inference.liveness import answer_of
from rayrl.inference.vllm_engine import VllmInferenceEngine, make_vllm_engine

pytestmark = pytest.mark.asyncio
TIMEOUT_S = 30.0


def dies_when_asked(times: int) -> Callable[[], Exception | None]:
    """No death but at the last of so many questions."""
    answers = iter([None] * (times - 1) + [RuntimeError("gone")])
    return lambda: next(answers)


async def test_answer_is_returned_and_errors_are_raised_when_the_other_side_lives() -> None:
    async def fails() -> None:
        raise ValueError("refused")

    assert await answer_of(asyncio.sleep(0, "done"), lambda: None) == "done"
    with pytest.raises(ValueError, match="refused"):
        await answer_of(fails(), lambda: None)


async def test_wait_ends_and_the_call_is_given_up_when_the_other_side_has_died() -> None:
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="gone"):
        await asyncio.wait_for(answer_of(answer, dies_when_asked(3), interval_s=0), TIMEOUT_S)

    await asyncio.sleep(0)
    assert answer.cancelled()


async def test_answer_that_came_is_returned_when_the_other_side_died_after_it() -> None:
    assert await answer_of(asyncio.sleep(0, "done"), lambda: RuntimeError("gone")) == "done"


class SilentVllm:
    """Answers nothing; its processes die as soon as it is asked for something."""

    dead_error = RuntimeError("EngineCore is gone")

    def __init__(self) -> None:
        self.errored = False

    async def pause_generation(self, **_: object) -> None:
        self.errored = True
        await asyncio.Event().wait()


def engine_on(vllm: SilentVllm) -> VllmInferenceEngine:
    config = InferenceConfig(engine=VllmEngine(type="vllm"))
    engine = make_vllm_engine(ModelConfig(path="unused"), config, name="silent", seed=0)
    engine._engine = vllm
    engine._lifecycle.move(EngineState.RUNNING)
    return engine


async def test_engine_fails_when_vllm_dies_during_a_call() -> None:
    engine = engine_on(SilentVllm())
    assert (await engine.status()).state is EngineState.RUNNING

    with pytest.raises(EngineError, match=r"engine silent failed: .*EngineCore is gone"):
        await asyncio.wait_for(engine.pause("keep"), TIMEOUT_S)

    assert (await engine.status()).state is EngineState.FAILED


async def test_status_says_failed_when_vllm_died_while_nothing_was_asked_of_it() -> None:
    vllm = SilentVllm()
    engine = engine_on(vllm)

    vllm.errored = True
    status = await engine.status()

    assert status.state is EngineState.FAILED and "EngineCore is gone" in str(status.failure)
    with pytest.raises(EngineError, match="engine silent failed"):
        await engine.load(0, {})
