"""A group of Ray actors of one class: started together or not at all, called with deadlines, gone after `shutdown`.

Actor classes are plain classes. Each has `ready()`, which returns `process_info.process_info()`, and `close()`; both
may be coroutine functions. `ray.remote` is applied here.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray

from rayrl.errors import RayrlError
from rayrl.infra.identity import ActorLabel
from rayrl.infra.waiting import wait_for, wait_for_all
from rayrl.utils.logger import get_logger

_LOG = get_logger("actors")


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
    """Members that were started."""
    closed: bool
    """True once it was shut down."""
    processes: tuple[str, ...]
    """Name, node and process id of each member."""


class ActorGroup:
    """Actors `name-0` to `name-(n-1)`. Made by `spawn`; belongs to one event loop."""

    def __init__(self, name: str, members: Sequence[Member]) -> None:
        self.name = name
        self.members = tuple(members)
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
        remote = ray.remote(actor_class)
        handles: list[Any] = []
        try:
            for args, options in zip(args_per_member, options_per_member, strict=True):
                handles.append(remote.options(**{**common, **options}).remote(*args))
            labels = [
                ActorLabel(name=f"{name}-{index}", actor_id=_actor_id(handle)) for index, handle in enumerate(handles)
            ]
            ready = await wait_for_all(
                [handle.ready.remote() for handle in handles],
                seconds=start_timeout_s,
                phase=f"start of {name}",
                actors=labels,
                what="ready()",
            )
        except BaseException:
            _kill(handles)
            raise
        members = [
            Member(name=label.name, index=index, handle=handle, node=at["node"], host=at["host"], pid=at["pid"])
            for index, (label, handle, at) in enumerate(zip(labels, handles, ready, strict=True))
        ]
        _LOG.info("started %s", ", ".join(str(member.label) for member in members))
        return cls(name, members)

    def __len__(self) -> int:
        return len(self.members)

    async def call(self, index: int, method: str, *args: Any, seconds: float, phase: str) -> Any:
        """Call one member and return its answer. Raises as `waiting.wait_for`."""
        member = self.members[index]
        ref = _submit(member, method, args)
        return await wait_for(ref, seconds=seconds, phase=phase, actor=member.label, what=f"{method}()")

    async def call_all(self, method: str, *args: Any, seconds: float, phase: str) -> list[Any]:
        """Call every member with the same arguments; the answers come in the order of the members."""
        return await self.call_each(method, [args] * len(self.members), seconds=seconds, phase=phase)

    async def call_each(
        self, method: str, args_per_member: Sequence[tuple[Any, ...]], *, seconds: float, phase: str
    ) -> list[Any]:
        """Call member i with `args_per_member[i]`. Fails on the first failure, as `waiting.wait_for_all`."""
        refs = [_submit(member, method, args) for member, args in zip(self.members, args_per_member, strict=True)]
        labels = [member.label for member in self.members]
        return await wait_for_all(refs, seconds=seconds, phase=phase, actors=labels, what=f"{method}()")

    async def shutdown(self, grace_s: float) -> None:
        """Call `close()` on every member, wait up to `grace_s`, then kill what is left. Never raises for a member.

        Calling it again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        try:
            outcomes = await asyncio.gather(
                *(
                    self.call(member.index, "close", seconds=grace_s, phase=f"shutdown of {self.name}")
                    for member in self.members
                ),
                return_exceptions=True,
            )
        finally:
            _kill([member.handle for member in self.members])
        for member, outcome in zip(self.members, outcomes, strict=True):
            if isinstance(outcome, RayrlError):
                _LOG.warning("%s did not close in order and was killed: %s", member.name, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def status(self) -> GroupStatus:
        """Return the group at this moment."""
        processes = tuple(str(member.label) for member in self.members)
        return GroupStatus(name=self.name, size=len(self.members), closed=self._closed, processes=processes)


def _submit(member: Member, method: str, args: Sequence[Any]) -> Any:
    return getattr(member.handle, method).remote(*args)


def _actor_id(handle: Any) -> str:
    # Handles have no public accessor of the id.
    return str(handle._actor_id.hex())


def _kill(handles: Sequence[Any]) -> None:
    for handle in handles:
        ray.kill(handle, no_restart=True)
