"""Calls to an engine end when what should answer has died or hangs: with stand-ins; test_vllm_engine.py has vLLM."""

import asyncio
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from rayrl.config.inference import InferenceConfig, ScriptedEngine, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.errors import EngineError
from rayrl.inference import threaded, vllm_api, vllm_engine
from rayrl.inference.lifecycle import EngineState
from rayrl.inference.liveness import answer_of
from rayrl.inference.scripted import ScriptedModel, scripted_engine
from rayrl.inference.vllm_engine import VllmInferenceEngine, make_vllm_engine
from rayrl.types.sampling import GenerationRequest, SamplingParams

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


async def test_vllm_is_ended_when_its_engine_was_closed_while_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, begun, may_end, ended = SilentVllm(), Event(), Event(), list[object]()

    def start(*_: object, **__: object) -> SilentVllm:
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        return vllm

    served = SimpleNamespace(limits=SimpleNamespace(max_context=8))
    monkeypatch.setattr(vllm_engine, "read_model", lambda model: served)
    monkeypatch.setattr(vllm_api, "require_vllm", lambda: "0.32.0")
    monkeypatch.setattr(vllm_api, "start_engine", start)
    monkeypatch.setattr(vllm_api, "stop_engine", lambda engine, timeout_s: ended.append(engine))
    engine = make_vllm_engine(
        ModelConfig(path="unused"), InferenceConfig(engine=VllmEngine(type="vllm")), name="late", seed=0
    )
    starting = asyncio.create_task(engine.start())
    assert await asyncio.to_thread(begun.wait, TIMEOUT_S)

    await engine.close()
    may_end.set()
    with pytest.raises(EngineError, match="engine late was closed while it started"):
        await starting

    assert ended == [None, vllm]
    assert (await engine.status()).state is EngineState.CLOSED


class EndlessStep(ScriptedModel):
    """Its first step ends when it may."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: [5])
        self.begun, self.may_end = Event(), Event()

    def step(self, rows: list[Any], groups: list[Any]) -> tuple[list[int], list[float]]:
        self.begun.set()
        assert self.may_end.wait(TIMEOUT_S)
        return super().step(rows, groups)


async def test_callers_get_an_error_when_the_thread_of_an_engine_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded, "_CLOSE_S", 0.01)
    model = EndlessStep()
    engine = scripted_engine(model, InferenceConfig(engine=ScriptedEngine(type="scripted", reply_tokens=(5,))))
    await engine.start()
    await engine.load(0, {})
    request = GenerationRequest(request_id="a", prompt_tokens=(2,), params=SamplingParams(max_new_tokens=1))
    waiting = asyncio.ensure_future(anext(engine.generate(request)))
    assert await asyncio.to_thread(model.begun.wait, TIMEOUT_S)

    with pytest.raises(EngineError, match="still in one step"):
        await engine.close()

    with pytest.raises(EngineError, match="still in one step"):
        await asyncio.wait_for(waiting, TIMEOUT_S)
    monkeypatch.setattr(threaded, "_CLOSE_S", TIMEOUT_S)
    model.may_end.set()
    await engine.close()
    assert (await engine.status()).state is EngineState.CLOSED
