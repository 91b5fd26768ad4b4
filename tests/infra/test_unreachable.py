"""A member that cannot be reached for the moment: a call that may go to any member is tried again."""

from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from rayrl.errors import ActorUnreachable, DeadlineExceeded
from rayrl.infra import actor_group
from rayrl.infra.actor_group import ActorGroup, Member
from rayrl.infra.failures import explain_failure


class Remote:
    """A method of a handle: fails until it was called often enough."""

    def __init__(self, group: ActorGroup, num_failures: int, then: Callable[[ActorGroup], None] | None = None) -> None:
        self.group = group
        self.left = num_failures
        self.then = then

    async def remote(self, value: int) -> int:
        if self.left > 0:
            self.left -= 1
            if self.left == 0 and self.then is not None:
                self.then(self.group)
            raise ActorUnavailableError("failed to connect to all addresses", b"0" * 16)
        return 2 * value


def group_of(*handles: Any) -> ActorGroup:
    group = ActorGroup("rollout", None, {})
    group._members = [
        Member(name=f"rollout-{index}", index=index, handle=handle, node="", host="", pid=1)
        for index, handle in enumerate(handles)
    ]
    for handle in handles:
        handle.double.group = group
    return group


class Handle:
    def __init__(self, num_failures: int, then: Callable[[ActorGroup], None] | None = None) -> None:
        self.double = Remote(None, num_failures, then)  # type: ignore[arg-type]
        self._actor_id = self

    def hex(self) -> str:
        return "0c5d94"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_group, "_UNREACHABLE_S", 0.0)
    monkeypatch.setattr("rayrl.infra.failures.describe_stderr", lambda actor: "its stderr is empty")


@pytest.mark.asyncio
async def test_call_is_repeated_when_the_member_is_back() -> None:
    assert await group_of(Handle(2)).call_any("double", 4, seconds=60, phase="rollout log") == 8


@pytest.mark.asyncio
async def test_call_goes_to_another_member_once_the_unreachable_one_is_taken_out() -> None:
    def take_out(group: ActorGroup) -> None:
        group._members.pop(0)

    assert await group_of(Handle(3, take_out), Handle(0)).call_any("double", 4, seconds=60, phase="rollout log") == 8


@pytest.mark.asyncio
async def test_call_ends_with_its_deadline_when_nobody_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(Handle(1, lambda group: group._members.clear()))
    with pytest.raises(DeadlineExceeded, match="rollout log: rollout has no member left"):
        await group.call_any("double", 4, seconds=0.05, phase="rollout log")


def test_lost_connection_is_no_death() -> None:
    error = explain_failure(ActorUnavailableError("gone for now", b"0" * 16), phase="p", actor="rollout-0")
    assert type(error) is ActorUnreachable
