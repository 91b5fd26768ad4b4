"""Where a further member of a group is started: in an empty bundle, or elsewhere where the bundle's node is dead."""

from collections.abc import Callable
from typing import Any

import pytest

from rayrl.driver import member_starter
from rayrl.driver.member_starter import MemberStarter
from rayrl.infra.actor_group import Member


class FakeGroup:
    def __init__(self) -> None:
        self.members = [Member(name="inference-0", index=0, handle=None, node="n0", host="", pid=0)]
        self.options: list[Any] = []

    async def add(self, args_of: Callable[[int], Any], options: Any, *, start_timeout_s: float) -> Member:
        self.options.append(options)
        return Member(name="inference-1", index=1, handle=None, node="n1", host="", pid=0)


class FakePlan:
    needs = {"CPU": 1.0}

    def role(self, name: str) -> "FakePlan":
        return self


class FakeReservation:
    plan = FakePlan()

    def options(self, role: str, index: int) -> str:
        return f"bundle {index}"

    def options_elsewhere(self, role: str) -> str:
        return "elsewhere"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("is_alive", "free_cpus", "expected"),
    [(True, 1.0, "bundle 0"), (False, 0.0, "bundle 0"), (False, 1.0, "elsewhere")],
)
async def test_successor_starts_elsewhere_only_if_the_node_is_dead_and_another_has_room(
    monkeypatch: pytest.MonkeyPatch, is_alive: bool, free_cpus: float, expected: str
) -> None:
    monkeypatch.setattr(member_starter, "is_node_alive", lambda node: is_alive)
    monkeypatch.setattr(member_starter, "free_by_node", lambda avoid: [{"CPU": free_cpus}])
    group: Any = FakeGroup()
    reservation: Any = FakeReservation()
    starter = MemberStarter(
        role="inference", group=group, reservation=reservation, args_of=lambda index: (), start_timeout_s=1.0
    )
    starter.leave("inference-0")
    await starter.start()
    assert group.options == [expected]
    assert starter.has_free_place is (expected == "elsewhere")
