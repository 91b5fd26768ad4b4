"""The contract of an inference engine: one suite for the fake and for the real engines."""

import asyncio

import pytest

from rayrl.errors import EngineError
from rayrl.inference.engine import EngineBusy, RequestRefused
from rayrl.inference.lifecycle import EngineState
from rayrl.inference.weights import dtype_name
from rayrl.infra.weight_manifest import checksum_of
from rayrl.types.sampling import join_chunks
from rayrl.types.trajectory import VersionSpan

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("kind", ["scripted", "embedded", pytest.param("vllm", marks=pytest.mark.vllm)]),
]


async def test_reply_has_max_new_tokens_when_nothing_stops_it(kind, make_engine):
    engine = await make_engine(kind)

    completion = await engine.complete(max_new_tokens=6, min_new_tokens=6)

    assert len(completion.tokens) == len(completion.logprobs) == 6
    assert completion.finish_reason == "length"
    assert completion.spans == (VersionSpan(start=0, end=6, version=0),)
    assert all(logprob <= 0 for logprob in completion.logprobs)


async def test_reply_ends_with_the_stop_token_when_it_is_sampled(kind, make_engine):
    engine = await make_engine(kind)
    free = await engine.complete(max_new_tokens=8, temperature=0, min_new_tokens=8)
    stop = free.tokens[3]
    first = free.tokens.index(stop)

    completion = await engine.complete(max_new_tokens=8, temperature=0, stop_token_ids=(stop,))

    assert completion.tokens == free.tokens[: first + 1]
    assert completion.finish_reason == "stop"


async def test_reply_ends_with_stop_when_the_stop_token_is_the_last_that_is_allowed(kind, make_engine):
    engine = await make_engine(kind)
    first = (await engine.complete(max_new_tokens=1, temperature=0, min_new_tokens=1)).tokens[0]

    completion = await engine.complete(max_new_tokens=1, temperature=0, stop_token_ids=(first,))

    assert (completion.tokens, completion.finish_reason) == ((first,), "stop")


async def test_reply_ends_when_a_stop_string_appears_in_the_text(kind, make_engine):
    engine = await make_engine(kind)
    free = await engine.complete(max_new_tokens=8, temperature=0, min_new_tokens=8)
    text = engine.text(free.tokens)
    stop = text[2:4]

    completion = await engine.complete(max_new_tokens=8, temperature=0, stop=("never", stop))

    assert completion.finish_reason == "stop"
    assert completion.tokens == free.tokens[: text.index(stop) + 2]


async def test_reply_ends_by_length_when_the_context_is_full(kind, make_engine):
    engine = await make_engine(kind)
    prompt = tuple(2 + index % 10 for index in range(45))

    completion = await engine.complete(prompt, max_new_tokens=20, min_new_tokens=20)

    assert (len(completion.tokens), completion.finish_reason) == (3, "length")


async def test_chunks_come_every_stream_interval_tokens(kind, make_engine):
    engine = await make_engine(kind, stream_interval=2)

    chunks = await engine.chunks(engine.request(max_new_tokens=5, min_new_tokens=5))

    assert [len(chunk.tokens) for chunk in chunks] == [2, 2, 1]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]


async def test_aborted_request_ends_with_the_tokens_that_it_has(kind, make_engine):
    engine = await make_engine(kind, steps=0)
    aborted = engine.request(max_new_tokens=10, min_new_tokens=10)
    other = engine.request(max_new_tokens=5, min_new_tokens=5)
    tasks = await engine.start(aborted, other)
    await engine.step(3)

    await engine.engine.abort(aborted.request_id)
    engine.run_freely()

    completion = join_chunks(await tasks[0])
    assert (len(completion.tokens), completion.finish_reason) == (3, "abort")
    assert len(join_chunks(await tasks[1]).tokens) == 5


async def test_waiting_request_ends_without_tokens_when_it_is_aborted(kind, make_engine):
    engine = await make_engine(kind, steps=0, max_batch_size=1)
    running, waiting = engine.request(), engine.request((5, 6))
    tasks = await engine.start(running, waiting)
    await engine.step()

    await engine.engine.abort(waiting.request_id)

    completion = join_chunks(await tasks[1])
    assert (completion.tokens, completion.finish_reason) == ((), "abort")
    assert (await engine.status()).num_waiting == 0
    engine.run_freely()
    assert join_chunks(await tasks[0]).finish_reason in ("length", "stop")


async def test_abort_of_an_unknown_request_changes_nothing(kind, make_engine):
    engine = await make_engine(kind)

    await engine.engine.abort("nobody")

    assert (await engine.complete()).tokens


async def test_request_is_aborted_when_its_caller_leaves(kind, make_engine):
    engine = await make_engine(kind, steps=0)
    (task,) = await engine.start(engine.request(max_new_tokens=40, min_new_tokens=40))
    await engine.step()

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.engine.abort("nobody")  # answered after the abort of the caller that left

    assert (await engine.status()).num_running == 0


async def test_paused_engine_keeps_requests_and_goes_on_after_resume(kind, make_engine):
    engine = await make_engine(kind)
    expected = await engine.complete(max_new_tokens=8, min_new_tokens=8, temperature=0)
    engine = await make_engine(kind, steps=0)
    (task,) = await engine.start(engine.request(max_new_tokens=8, min_new_tokens=8, temperature=0))
    await engine.step(3)

    await engine.engine.pause("keep")
    engine.run_freely()
    before = await engine.status()
    (late,) = await engine.start(engine.request())
    await engine.engine.pause("keep")
    after = await engine.status()

    assert (before.state, after.state) == (EngineState.PAUSED, EngineState.PAUSED)
    assert after.total_steps == 3 and after.num_running == 1 and after.num_waiting == 1
    await engine.engine.resume()
    assert join_chunks(await task).tokens == expected.tokens
    assert join_chunks(await late).tokens


async def test_pause_ends_all_requests_when_its_mode_is_abort(kind, make_engine):
    engine = await make_engine(kind, steps=0, max_batch_size=1)
    tasks = await engine.start(engine.request(max_new_tokens=9, min_new_tokens=9), engine.request((5,)))
    await engine.step(2)

    await engine.engine.pause("abort")

    completions = [join_chunks(await task) for task in tasks]
    assert [(len(item.tokens), item.finish_reason) for item in completions] == [(2, "abort"), (0, "abort")]
    assert (await engine.status()).state is EngineState.PAUSED


async def test_unknown_pause_mode_is_refused(kind, make_engine):
    engine = await make_engine(kind)

    with pytest.raises(EngineError, match="'sleep'"):
        await engine.engine.pause("sleep")


async def test_running_request_goes_on_with_new_weights_and_its_spans_show_it(kind, make_engine):
    engine = await make_engine(kind, steps=0)
    (task,) = await engine.start(engine.request(max_new_tokens=7, min_new_tokens=7))
    await engine.step(3)

    await engine.engine.load(1, engine.weights)
    await engine.step(2)
    await engine.engine.load(2, engine.weights)
    engine.run_freely()

    completion = join_chunks(await task)
    assert completion.spans == (
        VersionSpan(start=0, end=3, version=0),
        VersionSpan(start=3, end=5, version=1),
        VersionSpan(start=5, end=7, version=2),
    )
    assert (await engine.status()).version == 2


async def test_generate_is_refused_when_weights_were_never_pushed(kind, make_engine):
    engine = await make_engine(kind, version=None)

    assert (await engine.status()).version == -1
    with pytest.raises(EngineError, match="weights were never pushed"):
        await engine.complete()


async def test_generate_is_refused_when_the_prompt_is_too_long_and_others_go_on(kind, make_engine):
    engine = await make_engine(kind, steps=0)
    tasks = await engine.start(engine.request(tuple([2] * 48)), engine.request())
    engine.run_freely()

    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(results[0], RequestRefused)
    assert "48" in str(results[0]) and "model.max_context" in str(results[0])
    assert join_chunks(results[1]).tokens


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), {}, "no tokens"),
        ((2, 99), {}, "id 99"),
        ((2, -1), {}, "id -1"),
        ((2,), {"max_new_tokens": 0}, "max_new_tokens=0"),
        ((2,), {"temperature": -1.0}, "temperature=-1.0"),
        ((2,), {"temperature": float("nan")}, "temperature=nan"),
        ((2,), {"top_p": 0.0}, "top_p=0.0"),
        ((2,), {"top_k": -1}, "top_k=-1"),
        ((2,), {"min_new_tokens": -2}, "min_new_tokens=-2"),
        ((2,), {"stop_token_ids": (99,)}, "id 99"),
        ((2,), {"stop": ("",)}, "empty string"),
    ],
)
async def test_generate_is_refused_when_a_value_is_out_of_range(kind, make_engine, prompt, params, message):
    engine = await make_engine(kind)

    with pytest.raises(RequestRefused, match=message):
        await engine.complete(prompt, **params)

    assert (await engine.status()).state is EngineState.RUNNING


async def test_second_request_of_the_same_id_is_refused(kind, make_engine):
    engine = await make_engine(kind, steps=0)
    request = engine.request()
    tasks = await engine.start(request, request)
    engine.run_freely()

    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(results[1], RequestRefused) and "in flight" in str(results[1])
    assert join_chunks(results[0]).tokens


async def test_all_requests_end_when_there_are_many_more_than_slots(kind, make_engine):
    engine = await make_engine(kind, max_batch_size=3, prefill_tokens=7)
    prompts = [tuple(2 + (index + offset) % 12 for offset in range(1 + index % 5)) for index in range(25)]
    requests = [engine.request(prompt, max_new_tokens=1 + index % 4) for index, prompt in enumerate(prompts)]

    results = await asyncio.gather(*(engine.chunks(request) for request in requests))

    completions = [join_chunks(chunks) for chunks in results]
    assert all(1 <= len(item.tokens) <= 1 + index % 4 for index, item in enumerate(completions))
    status = await engine.status()
    assert (status.num_running, status.num_waiting, status.total_requests) == (0, 0, 25)
    assert status.total_tokens == sum(len(item.tokens) for item in completions)
    assert status.kv_use == 0


async def test_request_is_refused_for_now_when_the_queue_is_full(kind, make_engine):
    engine = await make_engine(kind, steps=0, max_batch_size=1, max_queued_requests=2)
    tasks = await engine.start(engine.request(max_new_tokens=3, min_new_tokens=3))
    await engine.step()
    tasks += await engine.start(engine.request((5,)), engine.request((6,)), engine.request((7,)))

    with pytest.raises(EngineBusy, match="max_queued_requests=2"):
        await tasks[3]

    engine.run_freely()
    assert all([join_chunks(await task).tokens for task in tasks[:3]])
    assert (await engine.complete((7,))).tokens


async def test_failure_of_the_loop_reaches_every_caller_with_its_cause(kind, make_engine):
    engine = await make_engine(kind, steps=0, max_batch_size=2)
    tasks = await engine.start(*(engine.request((2 + index,), max_new_tokens=9) for index in range(4)))
    await engine.step()

    _break(engine, ZeroDivisionError("the model broke"))
    engine.run_freely()

    results = await asyncio.gather(*tasks, return_exceptions=True)
    for error in results:
        assert isinstance(error, EngineError) and "ZeroDivisionError: the model broke" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)
    with pytest.raises(EngineError, match="the model broke"):
        await engine.complete()
    with pytest.raises(EngineError, match="the model broke"):
        await engine.engine.load(3, engine.weights)
    status = await engine.status()
    assert status.state is EngineState.FAILED and status.failure == "ZeroDivisionError: the model broke"


def _break(engine, error):
    """Make the model raise at its next step."""
    if engine.kind == "scripted":
        engine.model.fail_next_step(error)
        return

    def raise_error(*args, **kwargs):
        raise error

    engine.model[0].model.forward = raise_error


async def test_negative_version_is_refused(kind, make_engine):
    engine = await make_engine(kind)

    with pytest.raises(EngineError, match="version -1"):
        await engine.engine.load(-1, engine.weights)

    assert (await engine.status()).version == 0


async def test_waiting_callers_get_an_error_when_the_engine_is_closed(kind, make_engine):
    engine = await make_engine(kind, steps=0)
    tasks = await engine.start(engine.request())
    await engine.step()

    await engine.engine.close()
    await engine.engine.close()

    with pytest.raises(EngineError, match="CLOSED"):
        await tasks[0]
    with pytest.raises(EngineError, match="CLOSED"):
        await engine.complete()
    with pytest.raises(EngineError, match="CLOSED"):
        await engine.engine.resume()
    assert (await engine.status()).state is EngineState.CLOSED


async def test_command_whose_caller_left_does_not_disturb_the_engine(kind, make_engine):
    engine = await make_engine(kind)
    command = asyncio.ensure_future(engine.engine.load(1, engine.weights))
    await asyncio.sleep(0)
    command.cancel()
    await asyncio.gather(command, return_exceptions=True)

    assert (await engine.complete()).tokens


async def test_engine_says_why_it_cannot_sleep_and_goes_on(kind, make_engine):
    engine = await make_engine(kind)

    with pytest.raises(EngineError, match=r"cannot sleep.*inference\.engine\.sleep_mode=true"):
        await engine.engine.sleep()
    await engine.engine.wake()

    assert (await engine.complete()).tokens


async def test_checksums_are_those_of_the_weights_in_use_where_the_engine_can_say_them(kind, make_engine):
    engine = await make_engine(kind)
    changed = {name: 2 * tensor.detach() for name, tensor in engine.weights.items()}
    specs = [(name, tuple(item.shape), dtype_name(item)) for name, item in changed.items()]
    specs.append(("unknown", (1,), "float32"))

    times = await engine.engine.load(1, changed)
    found = await engine.engine.checksums(specs)

    assert found == {name: checksum_of(changed[name]) for name in found}
    assert ("model.norm.weight" in found) == (kind != "scripted"), "every real engine can say at least its norms"
    if kind == "embedded":
        assert found.keys() == changed.keys()
    assert times.pause_s >= times.load_s >= 0


async def test_staging_memory_keeps_its_bytes_until_it_is_asked_for_again(kind, make_engine):
    engine = await make_engine(kind)

    memory = await engine.engine.staging_memory(100)
    memory.fill_(7)
    await engine.complete(max_new_tokens=2)

    assert memory.numel() >= 100 and memory.device.type == "cpu"
    assert memory[:100].eq(7).all()
    assert (await engine.engine.staging_memory(50)).data_ptr() == memory.data_ptr()
