"""A group of Ray actors of one class: started together or not at all, called with deadlines, gone after `shutdown`.

Members may be taken out and others added while the group is used. A name is never used twice: whoever holds the name of
a dead member cannot reach its successor by it.

Actor classes are plain classes. Each has `ready()`, which returns `process_info.process_info()`, and `close()`; both
may be coroutine functions. Where a member's end is to be noticed at once it also has a coroutine function
`until_closed()`, which returns after `close()`. `ray.remote` is applied here.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.exceptions import RayError

from rayrl.errors import ActorDied, ActorUnreachable, DeadlineExceeded, RayrlError
from rayrl.infra.failures import explain_failure, is_death
from rayrl.infra.identity import ActorLabel
from rayrl.infra.outcomes import PendingCall
from rayrl.infra.waiting import wait_end, wait_for, wait_for_all
from rayrl.utils.logger import get_logger

_LOG = get_logger("actors")
_UNREACHABLE_S = 1.0
"""Between two questions to a member that Ray cannot reach for the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One running actor of a group."""

    name: str
    """Group and index, `inference-1`."""
    index: int
    """Position in the group."""
    handle: Any
    """Ray's handle."""
    node: str
    """Ray's id of its node."""
    host: str
    """IP address of its node."""
    pid: int
    """Process id on that node."""

    @property
    def label(self) -> ActorLabel:
        """The member as error messages name it."""
        return ActorLabel(name=self.name, node=self.node, host=self.host, pid=self.pid, actor_id=_actor_id(self.handle))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """A group at one moment.

    Example: `GroupStatus(name="train", size=2, closed=False, processes=("train-0 (node 10.0.0.4, pid 7)", "..."))`.
    """

    name: str
    """Name of the group."""
    size: int
    """Members at this moment."""
    closed: bool
    """True once it was shut down."""
    processes: tuple[str, ...]
    """Name, node and process id of each member."""


class ActorGroup:
    """Actors `name-0`, `name-1`, ... Made by `spawn`; belongs to one event loop."""

    def __init__(self, name: str, remote: Any, common: Mapping[str, Any]) -> None:
        self.name = name
        self.changed = asyncio.Event()
        """Set whenever a member comes or goes; whoever waits for it clears it first."""
        self._remote = remote
        self._common = dict(common)
        self._members: list[Member] = []
        self._starting: list[Any] = []
        self._next_index = 0
        self._closed = False

    @classmethod
    async def spawn(
        cls,
        name: str,
        actor_class: type,
        *,
        args_per_member: Sequence[tuple[Any, ...]],
        options_per_member: Sequence[Mapping[str, Any]],
        env: Mapping[str, str] | None = None,
        max_concurrency: int | None = None,
        start_timeout_s: float,
    ) -> Self:
        """Start one actor for each entry of `args_per_member` and wait until each is ready.

        If one fails, or the caller is cancelled, all that were started are killed before the error is raised.

        Args:
            options_per_member: Ray's actor options, as `Reservation.options` gives them.
            env: environment variables of the members' processes, set before their first import.
            max_concurrency: calls that a member runs at once; Ray's default when empty.
            start_timeout_s: deadline for all of them, `__init__` included.

        Raises:
            RayrlError: the one that a member's `__init__` or `ready` raised.
            ActorError: a member died or failed otherwise.
            DeadlineExceeded: not all were ready in time.
        """
        common: dict[str, Any] = {"runtime_env": {"env_vars": dict(env)}} if env else {}
        if max_concurrency is not None:
            common["max_concurrency"] = max_concurrency
        group = cls(name, ray.remote(actor_class), common)
        await group._start(args_per_member, options_per_member, start_timeout_s)
        return group

    @property
    def members(self) -> tuple[Member, ...]:
        """The members at this moment, oldest first."""
        return tuple(self._members)

    def find(self, name: str) -> Member | None:
        """Return a member by name; None if it is gone."""
        return next((member for member in self._members if member.name == name), None)

    async def add(
        self, args_of: Callable[[int], tuple[Any, ...]], options: Mapping[str, Any], *, start_timeout_s: float
    ) -> Member:
        """Start one more actor and return it once it is ready; `args_of` gets its index. Raises as `spawn`."""
        (member,) = await self._start([args_of(self._next_index)], [options], start_timeout_s)
        return member

    def remove(self, name: str) -> Member | None:
        """Kill a member and forget it; None if it is gone already."""
        member = self.find(name)
        if member is not None:
            self._members.remove(member)
            _kill([member.handle])
            self.changed.set()
        return member

    async def _start(
        self,
        args_per_member: Sequence[tuple[Any, ...]],
        options_per_member: Sequence[Mapping[str, Any]],
        start_timeout_s: float,
    ) -> list[Member]:
        first = self._next_index
        self._next_index += len(args_per_member)
        handles: list[Any] = []
        try:
            for args, options in zip(args_per_member, options_per_member, strict=True):
                handles.append(self._remote.options(**{**self._common, **options}).remote(*args))
                self._starting.append(handles[-1])
            labels = [
                ActorLabel(name=f"{self.name}-{index}", actor_id=_actor_id(handle))
                for index, handle in enumerate(handles, first)
            ]
            ready = await wait_for_all(
                [handle.ready.remote() for handle in handles],
                seconds=start_timeout_s,
                phase=f"start of {self.name if first == 0 else labels[0].name}",
                actors=labels,
                what="ready()",
            )
        except BaseException:
            _kill(handles)
            raise
        finally:
            self._starting = [handle for handle in self._starting if handle not in handles]
        members = [
            Member(name=label.name, index=index, handle=handle, node=at["node"], host=at["host"], pid=at["pid"])
            for index, (label, handle, at) in enumerate(zip(labels, handles, ready, strict=True), first)
        ]
        if self._closed:
            _kill(handles)
            raise ActorDied(f"{self.name} was shut down while {labels[0].name} started")
        self._members += members
        self.changed.set()
        _LOG.info("started %s", ", ".join(str(member.label) for member in members))
        return members

    def take_over(self, other: "ActorGroup") -> None:
        """Have the members of `other`, which is not to be used any more, in place of those of this group, shut down.

        For groups that live and die as a whole: whoever holds this one goes on with new members of the old names.
        """
        assert self._closed, f"{self.name} still runs: two generations of members would answer to the same names"
        self._members, self._next_index = list(other._members), other._next_index
        self._closed = False
        self.changed.set()

    def __len__(self) -> int:
        return len(self._members)

    async def call(self, index: int, method: str, *args: Any, seconds: float, phase: str) -> Any:
        """Call the member at a position in `members` and return its answer. Raises as `waiting.wait_for`."""
        if not 0 <= index < len(self._members):
            raise ActorDied(f"{phase}: {self.name} has {len(self._members)} members left, none at position {index}")
        member = self._members[index]
        ref = _submit(member, method, args)
        return await wait_for(ref, seconds=seconds, phase=phase, actor=member.label, what=f"{method}()")

    async def call_any(self, method: str, *args: Any, seconds: float, phase: str) -> Any:
        """Call the first member, and another one if it dies; waits while there is none, or while it cannot be reached.
        Raises as `waiting.wait_for`.

        For calls that may be repeated: one that died may have done its work before.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        dead: set[str] = set()
        while True:
            member = await self.wait_member(deadline, phase=phase, avoid=dead)
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            ref = _submit(member, method, args)
            try:
                return await wait_for(ref, seconds=left, phase=phase, actor=member.label, what=f"{method}()")
            except ActorDied as error:
                dead.add(member.name)
                _LOG.warning("%s goes to another member of %s: %s", phase, self.name, str(error).splitlines()[0])
            except ActorUnreachable as error:
                # Lost with its node, perhaps: whoever watches the members takes it out once that is known.
                _LOG.warning("%s is tried again: %s", phase, str(error).splitlines()[0])
                await asyncio.sleep(min(_UNREACHABLE_S, left))

    async def wait_member(self, deadline: float, *, phase: str, avoid: Collection[str] = ()) -> Member:
        """Return the first member that is not to be avoided. DeadlineExceeded at `deadline` on the loop's clock."""
        while True:
            found = next((member for member in self._members if member.name not in avoid), None)
            if found is not None:
                return found
            self.changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self.changed.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"{phase}: {self.name} has no member left, and none was added in time") from None

    def submit(self, method: str, *args: Any, names: Collection[str] | None = None) -> list[PendingCall]:
        """Call every member, or those named, with the same arguments, for `outcomes.gather_outcomes`."""
        chosen = [member for member in self._members if names is None or member.name in names]
        return [PendingCall(actor=member.label, ref=_submit(member, method, args)) for member in chosen]

    async def until_gone(self, member: Member) -> RayrlError | None:
        """Return once a member has died, with the reason, or has closed in order, with None. Has no deadline."""
        while True:
            error = await wait_end(_submit(member, "until_closed", ()))
            if error is None:
                return None
            if not isinstance(error, RayError):
                raise error
            if is_death(error):
                return await asyncio.to_thread(
                    explain_failure, error, phase=f"supervision of {self.name}", actor=member.label
                )
            await asyncio.sleep(_UNREACHABLE_S)

    async def call_all(self, method: str, *args: Any, seconds: float, phase: str) -> list[Any]:
        """Call every member with the same arguments; the answers come in the order of the members."""
        return await self.call_each(method, [args] * len(self._members), seconds=seconds, phase=phase)

    async def call_each(
        self, method: str, args_per_member: Sequence[tuple[Any, ...]], *, seconds: float, phase: str
    ) -> list[Any]:
        """Call member i with `args_per_member[i]`. Fails on the first failure, as `waiting.wait_for_all`."""
        refs = [_submit(member, method, args) for member, args in zip(self._members, args_per_member, strict=True)]
        labels = [member.label for member in self._members]
        return await wait_for_all(refs, seconds=seconds, phase=phase, actors=labels, what=f"{method}()")

    async def shutdown(self, grace_s: float) -> None:
        """Call `close()` on every member, wait up to `grace_s`, then kill what is left. Never raises for a member.

        Calling it again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        members = self.members
        try:
            outcomes = await asyncio.gather(
                *(
                    wait_for(
                        _submit(member, "close", ()),
                        seconds=grace_s,
                        phase=f"shutdown of {self.name}",
                        actor=member.label,
                        what="close()",
                    )
                    for member in members
                ),
                return_exceptions=True,
            )
        finally:
            _kill([*self._starting, *(member.handle for member in members)])
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, RayrlError):
                _LOG.warning("%s did not close in order and was killed: %s", member.name, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def status(self) -> GroupStatus:
        """Return the group at this moment."""
        processes = tuple(str(member.label) for member in self._members)
        return GroupStatus(name=self.name, size=len(self._members), closed=self._closed, processes=processes)


def _submit(member: Member, method: str, args: Sequence[Any]) -> Any:
    return getattr(member.handle, method).remote(*args)


def _actor_id(handle: Any) -> str:
    # Handles have no public accessor of the id.
    return str(handle._actor_id.hex())


def _kill(handles: Sequence[Any]) -> None:
    for handle in handles:
        ray.kill(handle, no_restart=True)
