"""Start further members of a running actor group, in the places that dead ones have left or elsewhere."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from rayrl.infra.actor_group import ActorGroup, Member
from rayrl.infra.nodes import fits, free_by_node, is_node_alive
from rayrl.infra.reservation import Reservation


class MemberStarter:
    """Knows which bundle of the reservation each member of one role sits in."""

    def __init__(
        self,
        *,
        role: str,
        group: ActorGroup,
        reservation: Reservation,
        args_of: Callable[[int], tuple[Any, ...]],
        start_timeout_s: float,
    ) -> None:
        """`group` has just been started: member i sits in bundle i. `args_of` gives the arguments of an index."""
        self.role = role
        self.group = group
        self._reservation = reservation
        self._args_of = args_of
        self._start_timeout_s = start_timeout_s
        self._free: list[int] = []
        self._slots: dict[str, int] = {member.name: slot for slot, member in enumerate(group.members)}
        self._nodes: dict[int, str] = {slot: member.node for slot, member in enumerate(group.members)}

    @property
    def has_free_place(self) -> bool:
        """True if a bundle of the reservation is empty."""
        return bool(self._free)

    async def start(self, *, in_bundle: bool = True) -> Member:
        """Start a member in an empty bundle, or anywhere in the cluster if there is none. Raises as `ActorGroup.add`.

        Ray moves the bundles of a node that died to another one, but takes its time: where another node has room, a
        member of a dead node starts there instead.
        """
        in_bundle = in_bundle and bool(self._free) and not await asyncio.to_thread(self._is_better_elsewhere)
        slot = self._free.pop(0) if self._free and in_bundle else None
        options = (
            self._reservation.options_elsewhere(self.role)
            if slot is None
            else self._reservation.options(self.role, slot)
        )
        try:
            member = await self.group.add(self._args_of, options, start_timeout_s=self._start_timeout_s)
        except BaseException:
            if slot is not None:
                self._free.insert(0, slot)
            raise
        if slot is not None:
            self._slots[member.name] = slot
            self._nodes[slot] = member.node
        return member

    def _is_better_elsewhere(self) -> bool:
        """Return whether the next empty bundle lay on a node that is dead, and another node has room now."""
        return not is_node_alive(self._nodes[self._free[0]]) and self.has_room_elsewhere(())

    def leave(self, name: str) -> None:
        """The place of a member that is gone may be taken by another one."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free.append(slot)
            self._free.sort()

    def has_room(self, avoid: Collection[str] = ()) -> bool:
        """Return whether a member would start now: an empty bundle, or a node with enough free resources."""
        return self.has_free_place or self.has_room_elsewhere(avoid)

    def has_room_elsewhere(self, avoid: Collection[str]) -> bool:
        """Return whether a node, other than those to be avoided, has enough free resources. May block."""
        return fits(self._reservation.plan.role(self.role).needs, free_by_node(avoid))
