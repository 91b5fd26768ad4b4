"""The sampler over engines: batching, continuation elsewhere, back-pressure, aborts."""

import asyncio

import pytest
from fakes import FakeEngine, chunk, finished

from rayrl.errors import ActorDied, ActorError, EngineError
from rayrl.rollout.engine_sampler import EngineSampler
from rayrl.types.sampling import GuidedDecoding, RequestFailure, SamplingParams
from rayrl.types.trajectory import VersionSpan

PARAMS = SamplingParams(max_new_tokens=8)


def sampler(max_attempts: int = 2, idle_timeout_s: float = 30.0, **engines: FakeEngine) -> EngineSampler:
    made = EngineSampler(name="r0", idle_timeout_s=idle_timeout_s, max_attempts=max_attempts)
    made.connect(engines)
    return made


@pytest.mark.asyncio
async def test_samples_of_one_tick_travel_in_one_call() -> None:
    engine = FakeEngine()
    subject = sampler(a=engine)
    await asyncio.gather(*(subject.sample([1, 2], PARAMS) for _ in range(4)))
    assert [len(call) for call in engine.calls] == [4]


@pytest.mark.asyncio
async def test_requests_go_to_the_least_loaded_engine() -> None:
    first, second = FakeEngine(), FakeEngine()
    subject = sampler(a=first, b=second)
    await asyncio.gather(*(subject.sample([1], PARAMS) for _ in range(4)))
    assert (len(first.calls[0]), len(second.calls[0])) == (2, 2)
    assert subject.load == {"a": 0, "b": 0}


@pytest.mark.asyncio
async def test_request_goes_on_elsewhere_with_its_tokens_when_the_engine_fails() -> None:
    first = FakeEngine([[chunk((5, 6), version=1)], ActorError("engine a died")])
    second = FakeEngine([[finished("", (7, 0), version=2)]])
    subject = sampler(a=first, b=second)
    completion = await subject.sample([1, 2], PARAMS)
    assert completion.tokens == (5, 6, 7, 0)
    assert completion.spans == (VersionSpan(start=0, end=2, version=1), VersionSpan(start=2, end=4, version=2))
    continued = second.calls[0][0]
    assert continued.prompt_tokens == (1, 2, 5, 6)
    assert continued.params.max_new_tokens == 6


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "special",
    [{"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"guided": GuidedDecoding(regex="a*")}, {"stop": ("x",)}],
)
async def test_request_starts_over_elsewhere_when_its_parameters_look_at_the_whole_completion(special) -> None:
    first = FakeEngine([[chunk((5, 6), version=1)], ActorError("engine a died")])
    second = FakeEngine([[finished("", (7, 0), version=2)]])

    completion = await sampler(a=first, b=second).sample([1, 2], SamplingParams(max_new_tokens=8, **special))

    assert (completion.tokens, completion.spans) == ((7, 0), (VersionSpan(start=0, end=2, version=2),))
    assert (second.calls[0][0].prompt_tokens, second.calls[0][0].params.max_new_tokens) == ((1, 2), 8)


@pytest.mark.asyncio
async def test_error_names_the_last_cause_when_all_attempts_fail() -> None:
    engine = FakeEngine([ActorError("first")], [ActorError("second")])
    with pytest.raises(EngineError, match="in 2 attempts; last cause: second"):
        await sampler(a=engine).sample([1], PARAMS)


@pytest.mark.asyncio
async def test_full_queue_is_tried_again_and_is_no_failed_attempt() -> None:
    busy = RequestFailure(request_id="", message="queue is full", retry=True)
    engine = FakeEngine([[busy]], [[busy]], [[finished("", (7,))]])
    completion = await sampler(max_attempts=1, a=engine).sample([1], PARAMS)
    assert completion.tokens == (7,)


@pytest.mark.asyncio
async def test_refusal_for_good_is_raised_at_once() -> None:
    engine = FakeEngine([[RequestFailure(request_id="", message="prompt of 99 tokens is too long", retry=False)]])
    with pytest.raises(EngineError, match="prompt of 99 tokens is too long"):
        await sampler(a=engine).sample([1], PARAMS)
    assert len(engine.calls) == 1


@pytest.mark.asyncio
async def test_stream_that_ends_early_is_a_failure_and_not_a_hang() -> None:
    engine = FakeEngine([[chunk((5,))]], [[finished("", (6,))]])
    completion = await sampler(a=engine).sample([1], PARAMS)
    assert completion.tokens == (5, 6)


@pytest.mark.asyncio
async def test_silent_engine_is_given_up_after_the_idle_timeout() -> None:
    class Silent(FakeEngine):
        async def stream(self, requests):  # type: ignore[no-untyped-def]
            await asyncio.Event().wait()
            yield []

    with pytest.raises(EngineError, match=r"sent nothing for 0\.01 s"):
        await sampler(max_attempts=1, idle_timeout_s=0.01, a=Silent()).sample([1], PARAMS)


@pytest.mark.asyncio
async def test_cancelled_episode_aborts_its_request_on_the_engine() -> None:
    class Endless(FakeEngine):
        async def stream(self, requests):  # type: ignore[no-untyped-def]
            self.calls.append(requests)
            started.set()
            yield [chunk((5,))]
            await asyncio.Event().wait()

    started = asyncio.Event()
    engine = Endless()
    subject = sampler(a=engine)
    task = asyncio.create_task(subject.sample([1], PARAMS))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == [engine.calls[0][0].request_id]
    assert subject.load == {"a": 0}
    await subject.close()


@pytest.mark.asyncio
async def test_sampling_without_engines_says_so() -> None:
    with pytest.raises(EngineError, match="no inference engine is connected"):
        await sampler().sample([1], PARAMS)


@pytest.mark.asyncio
async def test_interrupted_request_that_has_all_its_tokens_ends_by_length() -> None:
    engine = FakeEngine([[chunk((5, 6))], ActorError("gone")])
    completion = await sampler(a=engine).sample([1], SamplingParams(max_new_tokens=2))
    assert completion.tokens == (5, 6)
    assert completion.finish_reason == "length"


@pytest.mark.asyncio
async def test_request_waits_for_a_new_engine_when_the_last_one_died_and_keeps_its_tokens() -> None:
    first = FakeEngine([[chunk((5, 6), version=1)], ActorDied("engine a died")])
    second = FakeEngine([[finished("", (7, 0), version=2)]])
    subject = EngineSampler(name="r0", idle_timeout_s=30.0, max_attempts=1, engine_wait_s=30.0)
    subject.connect({"a": first})
    task = asyncio.create_task(subject.sample([1, 2], PARAMS))
    for _ in range(50):
        await asyncio.sleep(0)
    assert subject.load == {}
    subject.connect({"b": second})
    completion = await task
    assert completion.tokens == (5, 6, 7, 0)
    assert completion.spans == (VersionSpan(start=0, end=2, version=1), VersionSpan(start=2, end=4, version=2))
    assert second.calls[0][0].prompt_tokens == (1, 2, 5, 6)


@pytest.mark.asyncio
async def test_engine_that_died_gets_no_request_even_if_it_is_connected_again() -> None:
    dead, alive = FakeEngine([ActorDied("gone")]), FakeEngine()
    subject = sampler(max_attempts=1, a=dead, b=alive)
    await subject.sample([1], PARAMS)
    subject.connect({"a": dead, "b": alive})
    await subject.sample([1], PARAMS)
    assert len(dead.calls) == 1
    assert subject.load == {"b": 0}


@pytest.mark.asyncio
async def test_wait_for_an_engine_ends_and_names_the_last_cause() -> None:
    subject = EngineSampler(name="r0", idle_timeout_s=30.0, max_attempts=3, engine_wait_s=0.01)
    subject.connect({"a": FakeEngine([ActorDied("engine a was shot")])})
    with pytest.raises(EngineError, match=r"none came within 0\.01 s.*engine a was shot"):
        await subject.sample([1], PARAMS)
