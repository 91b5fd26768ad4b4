"""The small parts of an engine: rows, queue, stop strings, states."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.errors import EngineError, IllegalTransition
from rayrl.inference.backpressure import QueueLimit
from rayrl.inference.engine import EngineBusy
from rayrl.inference.lifecycle import EngineState, Lifecycle
from rayrl.inference.scheduler import Scheduler, Sequence
from rayrl.inference.stop_strings import StopStrings
from rayrl.types.sampling import GenerationRequest, SamplingParams


def sequence(request_id, prompt=(2,)):
    request = GenerationRequest(request_id=request_id, prompt_tokens=prompt, params=SamplingParams(max_new_tokens=1))
    return Sequence(request=request, seed=0, stop_strings=None)


def ids(sequences):
    return [item.request.request_id for item in sequences]


def test_equal_prompts_are_admitted_as_one_group():
    scheduler = Scheduler(max_batch_size=8, prefill_tokens=100)
    for request_id, prompt in [("a", (1, 2)), ("b", (3,)), ("c", (1, 2)), ("d", (3,))]:
        scheduler.add(sequence(request_id, prompt))

    groups = scheduler.admit()

    assert [(group.prompt_tokens, group.num_members) for group in groups] == [((1, 2), 2), ((3,), 2)]
    assert ids(scheduler.running) == ["a", "c", "b", "d"]


def test_group_is_split_when_there_are_too_few_rows():
    scheduler = Scheduler(max_batch_size=3, prefill_tokens=100)
    for request_id in "abcde":
        scheduler.add(sequence(request_id))

    first = scheduler.admit()
    scheduler.remove_row(0)
    second = scheduler.admit()

    assert [group.num_members for group in (*first, *second)] == [3, 1]
    assert ids(scheduler.running) == ["c", "b", "d"]
    assert scheduler.has_work


def test_prompt_longer_than_the_budget_is_admitted_alone():
    scheduler = Scheduler(max_batch_size=3, prefill_tokens=2)
    scheduler.add(sequence("long", (1, 2, 3)))
    scheduler.add(sequence("short", (4,)))

    assert [len(scheduler.admit()), len(scheduler.admit())] == [1, 1]
    assert ids(scheduler.running) == ["long", "short"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30))
def test_rows_stay_the_prefix_and_moves_say_where_each_one_went(removals):
    scheduler = Scheduler(max_batch_size=10, prefill_tokens=100)
    for number in range(10):
        scheduler.add(sequence(str(number)))
    scheduler.admit()
    cache = ids(scheduler.running)
    for removal in removals:
        if removal < len(scheduler.running):
            source = scheduler.remove_row(removal)
            if source is not None:
                cache[removal] = cache[source]
            cache.pop()
        assert cache == ids(scheduler.running)


@settings(deadline=None)
@given(st.text("ab\u00e9", max_size=20), st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_string_is_found_with_the_token_that_completes_it(text, stops):
    data = text.encode()
    watcher = StopStrings(tuple(stops), lambda tokens: bytes(tokens).decode(errors="replace"))

    for length in range(1, len(data) + 1):
        expected = any(stop in data[:length].decode(errors="replace") for stop in stops)
        assert watcher.found(list(data[:length])) == expected
        if expected:
            return


def test_stop_string_is_found_when_the_tokenizer_drops_the_leading_space_of_a_text():
    words = [" the", " end", " now"]
    watcher = StopStrings(("end now",), lambda tokens: "".join(words[token] for token in tokens).removeprefix(" "))

    assert [watcher.found([0]), watcher.found([0, 1]), watcher.found([0, 1, 2])] == [False, False, True]


def test_queue_takes_as_many_as_its_limit():
    limit = QueueLimit("e", 2)
    limit.enter()
    limit.enter()

    with pytest.raises(EngineBusy, match="2 waiting"):
        limit.enter()
    limit.leave(1)
    limit.enter()

    assert limit.num_waiting == 2


def test_moves_of_an_engine_are_those_of_the_table():
    lifecycle = Lifecycle("e")

    with pytest.raises(IllegalTransition, match=r"STARTING .* cannot become PAUSED; allowed: RUNNING, FAILED, CLOSED"):
        lifecycle.move(EngineState.PAUSED)
    lifecycle.move(EngineState.RUNNING)
    lifecycle.move(EngineState.RUNNING)
    lifecycle.move(EngineState.PAUSED)
    lifecycle.move(EngineState.CLOSED)
    with pytest.raises(IllegalTransition, match="allowed: none"):
        lifecycle.move(EngineState.RUNNING)


def test_first_cause_of_a_failure_is_kept():
    lifecycle = Lifecycle("e")

    lifecycle.fail(ValueError("first"))
    lifecycle.fail(ValueError("second"))

    error = lifecycle.unavailable()
    assert isinstance(error, EngineError) and str(error).endswith("ValueError: first")
    assert lifecycle.unavailable() is not error
