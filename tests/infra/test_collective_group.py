"""Groups over real gloo: who meets whom, and that a difference or an absence is an error with names in it."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rayrl.errors import DeadlineExceeded, TransferError
from rayrl.infra.collective_group import CollectiveGroup, HostedRendezvous, end_epoch
from rayrl.infra.rendezvous import RendezvousAddress, host_rendezvous

pytestmark = pytest.mark.distributed


def _ranks_after_broadcast_from(source: int):
    def work(group: CollectiveGroup) -> list[int]:
        tensor = torch.full((3,), group.rank)
        group.broadcast(tensor, source)
        return tensor.tolist()

    return work


def _nothing(group: CollectiveGroup) -> str:
    return "joined"


@pytest.mark.parametrize("source", [0, 2])
def test_broadcast_gives_all_members_the_tensor_of_the_named_source(hosted, run_members, source) -> None:
    assert run_members(hosted, [_ranks_after_broadcast_from(source)] * 3) == [[source] * 3] * 3


def test_group_works_under_the_next_epoch_after_a_member_left(hosted, run_members) -> None:
    run_members(hosted, [_ranks_after_broadcast_from(0)] * 3)

    results = run_members(hosted, [_ranks_after_broadcast_from(1)] * 2, epochs=[2, 2])

    assert results == [[1] * 3] * 2


def test_join_names_both_lists_when_the_members_differ(hosted, run_members) -> None:
    lists = [("train-0", "inference-0"), ("train-0", "inference-7")]

    first, second = run_members(hosted, [_nothing, _nothing], members=lists)

    for error, theirs, own in ((first, lists[1], lists[0]), (second, lists[0], lists[1])):
        assert isinstance(error, TransferError)
        assert f"expects [{', '.join(theirs)}], here it is [{', '.join(own)}]" in str(error)


def test_join_names_the_member_that_never_came(hosted, run_members) -> None:
    (present, second) = run_members(hosted, [_nothing, _nothing, None], timeout_s=0.5)

    for error in (present, second):
        assert isinstance(error, DeadlineExceeded)
        assert "inference-1 (rank 2, never seen)" in str(error)
        assert "group weights, epoch 1" in str(error)


def test_both_sides_learn_of_it_when_a_member_comes_with_an_old_epoch(hosted, run_members) -> None:
    new, old = run_members(hosted, [_nothing, _nothing], epochs=[2, 1], timeout_s=1.0)

    assert isinstance(old, TransferError)
    assert "train-0 is at epoch 2 already" in str(old)
    assert isinstance(new, DeadlineExceeded)
    assert "inference-0 (rank 1, last seen as inference-0 in epoch 1)" in str(new)


def test_join_is_refused_when_the_rank_is_taken_in_this_epoch(hosted, run_members) -> None:
    run_members(hosted, [_nothing, _nothing])

    errors = run_members(hosted, [_nothing, _nothing])

    assert all(isinstance(error, TransferError) and "the rank is taken" in str(error) for error in errors)


def test_join_says_where_it_looked_when_there_is_no_rendezvous() -> None:
    rendezvous = host_rendezvous("127.0.0.1", 5.0)
    address = RendezvousAddress(host="127.0.0.1", port=rendezvous.address.port)
    rendezvous.close()

    with pytest.raises(DeadlineExceeded, match=f"no rendezvous at 127.0.0.1:{address.port} within 1 s"):
        CollectiveGroup.join(
            address, name="weights", epoch=1, rank=1, members=("a", "b"), backend="gloo", timeout_s=1.0
        )


def test_agree_passes_many_times_when_all_say_the_same(hosted, run_members) -> None:
    def work(group: CollectiveGroup) -> int:
        for turn in range(5):
            group.agree("turn", str(turn))
        return group.rank

    assert run_members(hosted, [work] * 3) == [0, 1, 2]


def test_agree_names_member_and_values_when_they_differ(hosted, run_members) -> None:
    def work(group: CollectiveGroup) -> None:
        group.agree("manifest", f"version {group.rank}")

    first, second = run_members(hosted, [work] * 2)

    assert isinstance(first, TransferError)
    assert "inference-0 has manifest=version 1, here it is manifest=version 0" in str(first)
    assert isinstance(second, TransferError)


def test_agree_names_the_member_that_did_not_come(hosted, run_members) -> None:
    def alone(group: CollectiveGroup) -> None:
        group.agree("manifest", "x")

    error, _ = run_members(hosted, [alone, _nothing], timeout_s=0.5)

    assert isinstance(error, DeadlineExceeded)
    assert "inference-0 did not come to manifest" in str(error)


def test_broadcast_fails_at_once_when_a_member_closed_the_group(hosted, run_members) -> None:
    error, _ = run_members(hosted, [_ranks_after_broadcast_from(1), _nothing], timeout_s=200.0)

    assert isinstance(error, TransferError)
    assert "group weights, epoch 1, rank 0 (train-0): broadcast 0 of 24 bytes from rank 1 failed" in str(error)


def test_broadcast_ends_with_the_deadline_when_the_source_takes_no_part(hosted, run_members) -> None:
    over = threading.Event()

    def waits(group: CollectiveGroup) -> None:
        try:
            group.broadcast(torch.zeros(3), 1)
        finally:
            over.set()

    def takes_no_part(group: CollectiveGroup) -> None:
        over.wait(timeout=60)

    error, _ = run_members(hosted, [waits, takes_no_part], timeout_s=1.0)

    assert isinstance(error, DeadlineExceeded)
    assert "broadcast 0 of 12 bytes from rank 1 did not end within 1 s" in str(error)


def test_group_points_to_the_next_epoch_when_it_is_used_after_a_failure(hosted, run_members) -> None:
    def again(group: CollectiveGroup) -> None:
        with pytest.raises(TransferError):
            group.broadcast(torch.zeros(3), 1)
        group.broadcast(torch.zeros(3), 1)

    error, _ = run_members(hosted, [again, _nothing])

    assert isinstance(error, TransferError)
    assert "join again under the next epoch" in str(error)


@pytest.mark.parametrize("source", [-1, 2])
def test_broadcast_names_the_allowed_ranks_when_the_source_is_none(hosted, run_members, source) -> None:
    error, _ = run_members(hosted, [_ranks_after_broadcast_from(source), _nothing])

    assert isinstance(error, ValueError)
    assert f"source={source} is no rank; allowed: 0 to 1" in str(error)


@pytest.mark.parametrize(("how", "printed"), [("stay", "2000"), ("die", "")])
def test_processes_share_a_broadcast_and_a_death_ends_the_next_one(hosted: HostedRendezvous, how, printed) -> None:
    script = Path(__file__).with_name("member_process.py")
    command = [sys.executable, str(script), str(hosted.address.port)]
    others = [
        subprocess.Popen([*command, str(rank), "3", how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for rank in (1, 2)
    ]
    try:
        group = CollectiveGroup.join(
            hosted.address,
            name="weights",
            epoch=1,
            rank=0,
            members=("member-0", "member-1", "member-2"),
            backend="gloo",
            timeout_s=60.0,
            hosted=hosted,
        )
        group.broadcast(torch.full((1000,), 2.0), source=0)
        outputs = [other.communicate(timeout=60)[0].decode() for other in others]
        with pytest.raises(TransferError, match="broadcast 1 of 4000000 bytes from rank 0 failed"):
            group.broadcast(torch.zeros(1_000_000), source=0)
    finally:
        for other in others:
            other.kill()

    assert outputs == [printed] * 2


def test_member_that_waits_for_one_that_will_not_come_is_freed_when_the_epoch_is_ended(hosted, run_members) -> None:
    def wait_in_vain(group: CollectiveGroup) -> None:
        end_epoch(hosted.address, name="weights", epoch=1, reason="inference-0 died", timeout_s=30.0)
        group.agree("weights", "version 1")

    error, other = run_members(hosted, [wait_in_vain, _nothing], timeout_s=60.0)

    assert other == "joined"
    assert isinstance(error, TransferError)
    assert "this epoch is over: inference-0 died" in str(error)


def test_join_is_freed_when_the_epoch_is_ended(hosted, run_members) -> None:
    end_epoch(hosted.address, name="weights", epoch=1, reason="inference-0 died", timeout_s=30.0)

    (error,) = run_members(hosted, [_nothing, None], timeout_s=60.0)

    assert isinstance(error, TransferError)
    assert "this epoch is over: inference-0 died" in str(error)
