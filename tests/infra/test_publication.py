"""The phases of a publication and its verdict."""

import itertools

import pytest

from rayrl.errors import IllegalTransition
from rayrl.infra.publication import EngineAck, Publication, PublicationState, verify

_ORDER = [
    PublicationState.PREPARE,
    PublicationState.TRANSFER,
    PublicationState.VERIFY,
    PublicationState.COMMIT,
    PublicationState.DONE,
]
_LEGAL = set(itertools.pairwise(_ORDER)) | {(state, PublicationState.ABORTED) for state in _ORDER[:3]}


def _in_state(state: PublicationState) -> Publication:
    publication = Publication(version=7, engines=("inference-0", "inference-1"))
    path = [*_ORDER[1 : _ORDER.index(state) + 1]] if state in _ORDER else [PublicationState.ABORTED]
    for step in path:
        publication.move(step)
    return publication


def _ack(engine: str, digests: tuple[str, ...] = ("aa", "bb"), version: int = 7) -> EngineAck:
    return EngineAck(engine=engine, version=version, digests=digests)


@pytest.mark.parametrize("start", list(PublicationState))
@pytest.mark.parametrize("target", list(PublicationState))
def test_a_move_raises_unless_it_is_listed(start: PublicationState, target: PublicationState) -> None:
    publication = _in_state(start)

    if (start, target) in _LEGAL:
        publication.move(target)
        assert publication.state is target
    else:
        with pytest.raises(IllegalTransition, match=f"version 7 is in {start.name} and cannot move to {target.name}"):
            publication.move(target)
        assert publication.state is start


def test_verdict_is_good_when_every_engine_has_every_digest() -> None:
    verdict = verify(_in_state(PublicationState.VERIFY), ["aa", "bb"], [_ack("inference-1"), _ack("inference-0")])

    assert verdict.ok
    assert verdict.bad_engines == {}


@pytest.mark.parametrize(
    ("acks", "reason"),
    [
        ([], "did not acknowledge"),
        ([_ack("inference-1", ("aa", "xx"))], "first in bucket 1: sent bb, received xx"),
        ([_ack("inference-1", ("aa",))], "received 1 buckets of 2"),
        ([_ack("inference-1", version=6)], "staged version 6 instead"),
        ([_ack("inference-1"), _ack("inference-1", ("xx", "bb"))], "first in bucket 0"),
    ],
)
def test_verdict_names_engine_and_reason_when_one_differs(acks: list[EngineAck], reason: str) -> None:
    verdict = verify(_in_state(PublicationState.VERIFY), ["aa", "bb"], [_ack("inference-0"), *acks])

    assert not verdict.ok
    assert list(verdict.bad_engines) == ["inference-1"]
    assert reason in verdict.bad_engines["inference-1"]


def test_answers_of_others_are_ignored_when_they_take_no_part() -> None:
    acks = [_ack("inference-0"), _ack("inference-1"), _ack("inference-9", ("zz",))]

    assert verify(_in_state(PublicationState.VERIFY), ["aa", "bb"], acks).ok
