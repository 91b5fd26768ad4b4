import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.source import PromptRow
from rayrl.errors import CheckpointError, DataExhausted, IllegalTransition
from rayrl.types.prompt import Prompt, PromptId

ORDER_OF_SEED_7 = list("7461502374301526")


class NumberedSource:
    """Row i asks `i`."""

    def __init__(self, length: int, name: str = "numbers") -> None:
        self.name = name
        self._length = length

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> PromptRow:
        assert 0 <= index < self._length
        return PromptRow(text=str(index), answer=f"a{index}", metadata={"index": index})


def _stream(length: int = 5, seed: int = 1, shuffle: bool = True, name: str = "numbers") -> PromptStream:
    return PromptStream(NumberedSource(length, name), seed=seed, shuffle=shuffle)


def _take(stream: PromptStream, count: int) -> list[Prompt]:
    return [stream.next_prompt() for _ in range(count)]


def _id(ordinal: int, epoch: int = 0) -> PromptId:
    return PromptId(dataset="numbers", epoch=epoch, ordinal=ordinal)


def test_each_epoch_has_every_row_once_in_its_own_order() -> None:
    prompts = _take(_stream(20), 40)
    first, second = [p.text for p in prompts[:20]], [p.text for p in prompts[20:]]
    assert sorted(first, key=int) == sorted(second, key=int) == [str(i) for i in range(20)]
    assert first != second
    assert [p.id for p in prompts] == [_id(i % 20, epoch=i // 20) for i in range(40)]
    assert (prompts[0].answer, prompts[0].metadata) == (f"a{first[0]}", {"index": int(first[0])})


def test_order_is_pinned_by_seed_and_epoch() -> None:
    assert [p.text for p in _take(_stream(8, seed=7), 16)] == ORDER_OF_SEED_7
    assert [p.text for p in _take(_stream(8, seed=8), 8)] != ORDER_OF_SEED_7[:8]


def test_rows_come_in_file_order_when_shuffle_is_off() -> None:
    assert [p.text for p in _take(_stream(3, shuffle=False), 7)] == list("0120120")


def test_given_back_prompts_come_first_with_the_same_id_and_content() -> None:
    stream = _stream()
    first, second, third = _take(stream, 3)
    stream.give_back(third.id)
    stream.give_back(first.id)
    assert _take(stream, 2) == [first, third]
    assert stream.next_prompt().id == _id(3)
    stream.account(second.id)


def test_frontier_is_the_first_prompt_not_accounted_for() -> None:
    stream = _stream(3)
    for prompt in _take(stream, 4)[1:]:
        stream.account(prompt.id)
    assert stream.frontier == _id(0)
    assert (stream.status().num_out, stream.status().num_ahead) == (1, 3)
    stream.account(_id(0))
    assert stream.frontier == _id(1, epoch=1)
    assert (stream.status().num_out, stream.status().num_ahead) == (0, 0)


@pytest.mark.parametrize("action", ["account", "give_back"])
def test_prompt_that_is_not_out_is_refused(action: str) -> None:
    stream = _stream()
    first, second = _take(stream, 2)
    stream.account(first.id)
    stream.give_back(second.id)
    move = getattr(stream, action)
    with pytest.raises(IllegalTransition, match="accounted for already"):
        move(first.id)
    with pytest.raises(IllegalTransition, match="given back and not handed out again"):
        move(second.id)
    with pytest.raises(IllegalTransition, match=r"numbers/0/4 .*never handed out"):
        move(_id(4))
    with pytest.raises(IllegalTransition):
        move(PromptId(dataset="other", epoch=0, ordinal=0))


def test_restore_hands_out_again_what_was_not_accounted_for() -> None:
    stream = _stream()
    prompts = _take(stream, 4)
    stream.account(prompts[0].id)
    stream.account(prompts[2].id)
    resumed = _stream()
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert _take(resumed, 2) == [prompts[1], prompts[3]]
    assert resumed.next_prompt().id == _id(4)


def test_held_prompts_are_not_handed_out_again_but_can_be_accounted_for() -> None:
    stream = _stream()
    prompts = _take(stream, 3)
    resumed = _stream()
    resumed.restore(stream.state(), held=[prompts[1].id])
    assert [p.id for p in _take(resumed, 2)] == [_id(0), _id(2)]
    resumed.account(_id(1))
    with pytest.raises(IllegalTransition):
        resumed.account(_id(1))


def test_held_prompt_is_not_handed_out_when_it_is_accounted_for_first() -> None:
    stream = _stream()
    first = stream.next_prompt()
    resumed = _stream()
    resumed.restore(stream.state(), held=[first.id])
    resumed.account(first.id)
    assert resumed.next_prompt().id == _id(1)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"length": 6}, "length=5, this run's has 6"),
        ({"seed": 2}, "seed=1, this run's has 2"),
        ({"name": "letters"}, "source='numbers', this run's has 'letters'"),
        ({"shuffle": False}, "shuffle=True"),
    ],
)
def test_state_of_another_source_is_refused_with_what_differs(other: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        _stream(**other).restore(_stream().state())


def test_state_is_refused_when_the_source_was_edited_and_kept_its_name_and_length() -> None:
    class EditedSource(NumberedSource):
        def row(self, index: int) -> PromptRow:
            return replace(super().row(index), answer="another")

    stream = PromptStream(EditedSource(5), seed=1, shuffle=True)
    with pytest.raises(CheckpointError, match="dataset has sample="):
        stream.restore(_stream().state())


def test_state_of_a_release_without_a_sample_is_taken() -> None:
    state = {key: value for key, value in _stream().state().items() if key != "sample"}
    resumed = _stream()
    resumed.restore(state)
    assert resumed.frontier == _id(0)


def test_held_prompt_that_is_accounted_for_is_refused_and_nothing_changes() -> None:
    stream = _stream()
    first, second = _take(stream, 2)
    stream.account(first.id)
    resumed = _stream()
    with pytest.raises(CheckpointError, match="numbers/0/0"):
        resumed.restore(stream.state(), held=[first.id])
    with pytest.raises(CheckpointError, match="given twice"):
        resumed.restore(stream.state(), held=[second.id, second.id])
    assert resumed.frontier == _id(0)


# `next` is there twice, or the stream would mostly be empty.
_ACTIONS = st.sampled_from(["next", "next", "account", "give_back", "save", "restore", "restore_held"])


@settings(max_examples=300, deadline=None)
@given(
    length=st.integers(1, 4),
    moves=st.lists(st.tuples(_ACTIONS, st.integers(0, 99)), max_size=50),
    shuffle=st.booleans(),
)
def test_every_prompt_of_a_finished_epoch_is_accounted_for_exactly_once(
    length: int, moves: list[tuple[str, int]], shuffle: bool
) -> None:
    stream = _stream(length, shuffle=shuffle)
    out: dict[PromptId, Prompt] = {}
    contents: dict[PromptId, Prompt] = {}
    accounted: list[PromptId] = []
    saved = (json.dumps(stream.state()), list(accounted), dict(out))

    def hand_out() -> None:
        prompt = stream.next_prompt()
        assert prompt.id not in out
        assert prompt.id not in accounted
        assert contents.setdefault(prompt.id, prompt) == prompt
        out[prompt.id] = prompt

    for action, choice in moves:
        chosen = sorted(out)[choice % len(out)] if out else None
        if action == "next":
            hand_out()
        elif action == "account" and chosen is not None:
            stream.account(chosen)
            accounted.append(chosen)
            del out[chosen]
        elif action == "give_back" and chosen is not None:
            stream.give_back(chosen)
            del out[chosen]
        elif action == "save":
            saved = (json.dumps(stream.state()), list(accounted), dict(out))
        elif action.startswith("restore"):
            state, saved_accounted, saved_out = saved
            accounted = list(saved_accounted)
            keep = choice % (len(saved_out) + 1) if action == "restore_held" else 0
            out = {prompt_id: saved_out[prompt_id] for prompt_id in sorted(saved_out)[:keep]}
            stream = _stream(length, shuffle=shuffle)
            stream.restore(json.loads(state), held=list(out))

    goal = stream.frontier.epoch + 2
    while stream.frontier.epoch < goal:
        hand_out()
        for prompt_id in list(out):
            stream.account(prompt_id)
            accounted.append(prompt_id)
            del out[prompt_id]
    finished = [prompt_id for prompt_id in accounted if prompt_id.epoch < goal]
    assert sorted(finished) == [_id(ordinal, epoch) for epoch in range(goal) for ordinal in range(length)]
    for epoch in range(goal):
        assert {contents[_id(ordinal, epoch)].text for ordinal in range(length)} == {str(i) for i in range(length)}


def test_stream_with_a_number_of_epochs_ends_by_name_and_hands_returned_prompts_out_again() -> None:
    stream = PromptStream(NumberedSource(2), seed=1, shuffle=False, max_epochs=2)
    prompts = [stream.next_prompt() for _ in range(4)]

    with pytest.raises(DataExhausted, match=r"all 2 prompts were handed out dataset\.epochs=2 times"):
        stream.next_prompt()
    stream.give_back(prompts[1].id)

    assert stream.next_prompt().id == prompts[1].id
