"""Finished groups that wait for a training step: references and counts, never tokens."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rayrl.types.trajectory import GroupSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedGroup:
    """One finished group."""

    ticket: int
    """Order of admission; batches take the lowest first, so that slow groups do not age in the buffer."""
    summary: GroupSummary
    batch: Any
    """Reference to the group's Arrow record batch in the object store."""
    node: str = ""
    """Ray's id of the node on which the batch was made and, unless it is small, lies; empty if not known."""


class GroupBuffer:
    """Single-loop buffer: the rollout loop puts, the train loop takes.

    `take` waits for `put`; `fail` unblocks it with the error that ended the rollout loop.
    """

    def __init__(self) -> None:
        self._groups: dict[int, BufferedGroup] = {}
        self._next_ticket = 0
        self._arrived = asyncio.Event()
        self._error: BaseException | None = None
        self._interruption: BaseException | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def new_ticket(self) -> int:
        """Return the place of the next group in the order of admission; groups of a checkpoint come first."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        return ticket

    def put(self, group: BufferedGroup) -> None:
        """Add a group and wake the train loop."""
        assert group.ticket not in self._groups, f"ticket {group.ticket} is buffered twice"
        self._groups[group.ticket] = group
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Let every present and future `wait` raise `error`, or that of an earlier call: the first is the cause."""
        if self._error is None:
            self._error = error
        self._arrived.set()

    def interrupt(self, error: BaseException) -> None:
        """Let the present or the next `wait` raise `error`, once."""
        self._interruption = error
        self._arrived.set()

    def forget_interruption(self) -> None:
        """Its cause is gone."""
        self._interruption = None

    def wake(self) -> None:
        """Let `wait` look again at its condition."""
        self._arrived.set()

    async def wait(self, is_enough: Callable[["GroupBuffer"], bool], *, idle_s: float, waiting_for: str) -> None:
        """Return once `is_enough(self)`. TimeoutError if no group arrives for `idle_s`, counted from the last one."""
        while not is_enough(self):
            if self._error is not None:
                raise self._error
            if self._interruption is not None:
                error, self._interruption = self._interruption, None
                raise error
            self._arrived.clear()
            try:
                async with asyncio.timeout(idle_s):
                    await self._arrived.wait()
            except TimeoutError:
                raise TimeoutError(f"no group arrived for {idle_s} s: {waiting_for}; {len(self)} buffered") from None

    def in_order(self) -> list[BufferedGroup]:
        """Return the buffered groups in order of admission."""
        return [self._groups[ticket] for ticket in sorted(self._groups)]

    def replace(self, groups: Collection[BufferedGroup]) -> None:
        """Hold exactly these groups from now on."""
        self._groups = {group.ticket: group for group in groups}
        self._arrived.set()

    def remove(self, tickets: list[int]) -> None:
        """Take groups out: they are being trained on, or dropped."""
        for ticket in tickets:
            del self._groups[ticket]
