"""The group buffer between the loops."""

import asyncio

import pytest
from groups import buffered

from rayrl.driver.group_buffer import GroupBuffer


@pytest.mark.asyncio
async def test_wait_returns_when_enough_groups_have_arrived() -> None:
    buffer = GroupBuffer()
    waiter = asyncio.create_task(buffer.wait(lambda b: len(b) >= 2, idle_s=30, waiting_for="two groups"))
    buffer.put(buffered(1))
    await asyncio.sleep(0)
    assert not waiter.done()
    buffer.put(buffered(0))
    await waiter
    assert [group.ticket for group in buffer.in_order()] == [0, 1]


@pytest.mark.asyncio
async def test_wait_raises_the_error_of_the_rollout_loop_when_it_fails_meanwhile() -> None:
    buffer = GroupBuffer()
    waiter = asyncio.create_task(buffer.wait(lambda b: len(b) >= 1, idle_s=30, waiting_for="a group"))
    await asyncio.sleep(0)
    buffer.fail(RuntimeError("worker 3 is gone"))
    with pytest.raises(RuntimeError, match="worker 3 is gone"):
        await waiter


@pytest.mark.asyncio
async def test_wait_raises_the_first_error_when_others_follow_from_it() -> None:
    buffer = GroupBuffer()
    buffer.fail(RuntimeError("4 groups failed"))
    buffer.fail(RuntimeError("5 groups failed"))
    with pytest.raises(RuntimeError, match="4 groups failed"):
        await buffer.wait(lambda b: len(b) >= 1, idle_s=30, waiting_for="a group")


@pytest.mark.asyncio
async def test_wait_raises_an_interruption_once_and_not_one_that_is_forgotten() -> None:
    buffer = GroupBuffer()
    waiter = asyncio.create_task(buffer.wait(lambda b: len(b) >= 1, idle_s=30, waiting_for="a group"))
    await asyncio.sleep(0)
    buffer.interrupt(RuntimeError("train-0 died"))
    with pytest.raises(RuntimeError, match="train-0 died"):
        await waiter
    buffer.interrupt(RuntimeError("train-1 died"))
    buffer.forget_interruption()
    with pytest.raises(TimeoutError, match="a group"):
        await buffer.wait(lambda b: len(b) >= 1, idle_s=0.001, waiting_for="a group")


@pytest.mark.asyncio
async def test_wait_says_what_it_waited_for_when_no_group_arrives_in_time() -> None:
    buffer = GroupBuffer()
    with pytest.raises(TimeoutError, match=r"no group arrived for 0\.01 s: step 3 needs 4 groups; 0 buffered"):
        await buffer.wait(lambda b: len(b) >= 4, idle_s=0.01, waiting_for="step 3 needs 4 groups")


@pytest.mark.asyncio
async def test_wake_lets_a_waiter_look_at_its_condition_again() -> None:
    buffer = GroupBuffer()
    stopped: list[bool] = []
    waiter = asyncio.create_task(buffer.wait(lambda b: bool(stopped), idle_s=30, waiting_for="a stop"))
    await asyncio.sleep(0)
    stopped.append(True)
    buffer.wake()
    await waiter
    assert len(buffer) == 0


def test_ticket_can_be_buffered_only_once() -> None:
    buffer = GroupBuffer()
    buffer.put(buffered(1))
    with pytest.raises(AssertionError, match="ticket 1"):
        buffer.put(buffered(1))


def test_new_tickets_never_meet_those_of_restored_groups() -> None:
    buffer = GroupBuffer()
    for _ in range(3):
        buffer.put(buffered(buffer.new_ticket()))
    buffer.put(buffered(buffer.new_ticket()))
    assert [group.ticket for group in buffer.in_order()] == [0, 1, 2, 3]
