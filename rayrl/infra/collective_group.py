"""Collective groups with a name, an epoch and explicit members, apart from torch's global process group.

A group is built for one epoch of its membership and never changes: when a member leaves or joins, all close it and
join again under the next epoch. Before anything moves, the members compare through the store what they believe
(`join`: members and epoch; `agree`: any value), so that a difference is an error with names in it and not a hang.

    host_rendezvous (rank 0) ──address──> join on every member ──> agree, broadcast, ... ──> close on every member

A member that fails closes its group; that ends the operations of the others at once. All calls block: use them from
a thread that is not an event loop's, and one group from one thread at a time.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # the stores are public, but not in `__all__`
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from rayrl.errors import DeadlineExceeded, TransferError
from rayrl.infra.collective_recorder import CollectiveRecorder
from rayrl.infra.rendezvous import HostedRendezvous, RendezvousAddress, host_rendezvous, reach_rendezvous

__all__ = ["CollectiveGroup", "HostedRendezvous", "PendingBroadcast", "RendezvousAddress", "host_rendezvous"]

Backend = Literal["gloo", "nccl"]
_POLL_S = 0.01
_OVER = "over"
"""Key that `end_epoch` sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLabel:
    """A member of a group as error messages name it."""

    name: str
    """Name of the group."""
    epoch: int
    """Epoch of its membership."""
    rank: int
    """Rank of this process."""
    members: tuple[str, ...]
    """Names of all members, by rank."""

    def __str__(self) -> str:
        return f"group {self.name}, epoch {self.epoch}, rank {self.rank} ({self.members[self.rank]})"


class CollectiveGroup:
    """One process's part in a group; made by `join`."""

    def __init__(
        self,
        label: GroupLabel,
        backend: Backend,
        timeout_s: float,
        group: Any,
        store: Store,
        recorder: CollectiveRecorder | None = None,
    ) -> None:
        self.label = label
        self.backend: Backend = backend
        self.timeout_s = timeout_s
        self._group = group
        self._scoped = store
        self._store = PrefixStore("agree", store)
        self._closed: str | None = None
        self._pending: list[PendingBroadcast] = []
        self._num_agreements = 0
        self._num_operations = 0
        self._recorder = recorder

    @classmethod
    def join(
        cls,
        address: RendezvousAddress,
        *,
        name: str,
        epoch: int,
        rank: int,
        members: Sequence[str],
        backend: Backend,
        timeout_s: float,
        hosted: HostedRendezvous | None = None,
        recorder: CollectiveRecorder | None = None,
    ) -> Self:
        """Meet all members and connect to them. Every member calls this with the same arguments, but for the rank.

        Args:
            address: where rank 0 hosts the rendezvous; it may serve several epochs.
            members: names of all members, by rank.
            timeout_s: limit of joining as a whole, and later of each operation.
            hosted: the rendezvous, in the process that hosts it.
            recorder: notes each operation, if given.

        Raises:
            DeadlineExceeded: somebody did not come; the message names who, and what they announced instead.
            TransferError: the members differ about who takes part, or the rank is taken.
        """
        label = GroupLabel(name=name, epoch=epoch, rank=rank, members=tuple(members))
        deadline = time.monotonic() + timeout_s
        store = hosted.store if hosted is not None else reach_rendezvous(address, timeout_s)
        scoped = PrefixStore(f"{name}/{epoch}", store)
        _meet(label, PrefixStore(name, store), scoped, deadline, timeout_s)
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            group = _connect(backend, PrefixStore("connect", scoped), rank, len(members), address, left)
        except RuntimeError as error:
            raise DeadlineExceeded(f"{label}: the members met but could not connect: {error}") from error
        return cls(label, backend, timeout_s, group, scoped, recorder)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.label.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.label.members)

    @property
    def device(self) -> torch.device:
        """Where tensors must be for this backend."""
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")

    def agree(self, topic: str, value: str) -> None:
        """Return once every member has called this with the same topic and value; a barrier with names.

        Raises:
            TransferError: a member brings another topic or value.
            DeadlineExceeded: a member did not come.
        """
        self._check_open(f"agree on {topic}")
        turn = self._num_agreements
        self._num_agreements += 1
        mine = json.dumps([topic, value])
        try:
            self._store.set(f"{turn}/{self.rank}", mine)
            if turn >= 2:
                # Whoever is at `turn - 1` has read all of `turn - 2`, and all have come to `turn - 1`.
                self._store.delete_key(f"{turn - 2}/{self.rank}")
            deadline = time.monotonic() + self.timeout_s
            for other, member in enumerate(self.label.members):
                if not _wait_for_key(self._store, f"{turn}/{other}", deadline, self._check_not_over):
                    raise DeadlineExceeded(f"{self.label}: {member} did not come to {topic} in {self.timeout_s:g} s")
                theirs = self._store.get(f"{turn}/{other}").decode()
                if theirs != mine:
                    their_topic, their_value = json.loads(theirs)
                    raise TransferError(
                        f"{self.label}: the members differ: {member} has {their_topic}={their_value}, "
                        f"here it is {topic}={value}"
                    )
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"{self.label}: the rendezvous was lost during {topic}: {error}") from error

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with that of rank `source`; all members give the same shape and data type.

        Raises:
            TransferError: a member left, or the group is closed.
            DeadlineExceeded: a member did not take part in time.
        """
        self.start_broadcast(tensor, source).wait()

    def start_broadcast(self, tensor: Tensor, source: int) -> "PendingBroadcast":
        """Begin a broadcast; `tensor` must stay as it is until `wait` has returned. Wait for all in the order of calls.

        With nccl it is finished on return: a second communicator on the same GPU, such as that of the training
        mesh, must not have work in flight at the same time.
        """
        what = f"broadcast {self._num_operations} of {tensor.numel() * tensor.element_size()} bytes from rank {source}"
        self._check_open(what)
        if not 0 <= source < self.size:
            raise ValueError(f"{self.label}: source={source} is no rank; allowed: 0 to {self.size - 1}")
        if not tensor.is_contiguous() or tensor.device.type != self.device.type:
            raise ValueError(f"{self.label}: {what} needs a contiguous tensor on {self.device.type}")
        self._num_operations += 1
        if self._recorder is not None:
            self._recorder.note(
                "broadcast",
                group=f"{self.label.name}/{self.label.epoch}",
                rank=self.rank,
                members=self.label.members,
                shape=str(list(tensor.shape)),
                dtype=str(tensor.dtype).removeprefix("torch."),
                reduction=f"from {source}",
                compares=False,
            )
        options = BroadcastOptions()
        options.rootRank = source
        options.timeout = timedelta(seconds=self.timeout_s)
        try:
            work = self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._failure(what, error) from error
        pending = PendingBroadcast(self, work, what)
        self._pending.append(pending)
        if self.backend == "nccl":
            pending.wait()
        return pending

    def close(self) -> None:
        """Leave the group; operations in which others wait for this member fail. Calling it again does nothing."""
        self._close("it was closed")

    def _close(self, reason: str) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        if self.backend == "nccl":
            self._group.abort()
        # gloo closes its connections when the last reference goes, and work under way holds some.
        for pending in list(self._pending):
            pending.drop()
        self._pending.clear()
        self._group = None

    def _done(self, pending: "PendingBroadcast") -> None:
        if pending in self._pending:
            self._pending.remove(pending)

    def _check_not_over(self) -> None:
        _refuse_over(self.label, self._scoped)

    def _check_open(self, what: str) -> None:
        if self._closed is not None:
            raise TransferError(f"{self.label}: cannot {what}: {self._closed}; join again under the next epoch")

    def _failure(self, what: str, error: BaseException) -> TransferError | DeadlineExceeded:
        """Return the error to raise; the group is closed, since the members no longer agree on what was done."""
        text = str(error).splitlines()[0]
        self._close(f"{what} failed before ({text})")
        if "timed out" in text.lower():
            return DeadlineExceeded(f"{self.label}: {what} did not end within {self.timeout_s:g} s: {text}")
        return TransferError(f"{self.label}: {what} failed: {text}; members: {', '.join(self.label.members)}")


class PendingBroadcast:
    """A broadcast under way."""

    def __init__(self, group: CollectiveGroup, work: Any, what: str) -> None:
        self._group = group
        self._work = work
        self._what = what

    def wait(self) -> None:
        """Return when the bytes are there, at once if called again. Raises as `CollectiveGroup.broadcast`."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            if self._group.backend == "nccl":
                self._poll(work)
            else:
                work.wait()
        except RuntimeError as error:
            del work
            raise self._group._failure(self._what, error) from error
        self._group._done(self)

    def drop(self) -> None:
        """Wait for it no more; the group was closed."""
        self._work = None

    def _poll(self, work: Any) -> None:
        """Wait for a GPU's work; its own `wait` only makes a stream wait and has no limit on the host."""
        deadline = time.monotonic() + self._group.timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("timed out")
            time.sleep(_POLL_S / 10)
        work.wait()


def _meet(label: GroupLabel, announced: Store, scoped: Store, deadline: float, timeout_s: float) -> None:
    """Tell the others about this member and wait until all have told the same."""
    if scoped.add(f"claimed/{label.rank}", 1) > 1:
        raise TransferError(f"{label}: the rank is taken in this epoch; whoever comes back joins under the next one")
    announced.set(f"announced/{label.rank}", json.dumps([label.epoch, label.members[label.rank]]))
    scoped.set(f"members/{label.rank}", json.dumps(label.members))
    for other in range(len(label.members)):
        if not _wait_for_key(scoped, f"members/{other}", deadline, lambda: _refuse_ended(label, announced, scoped)):
            raise DeadlineExceeded(f"{label}: waited {timeout_s:g} s for {_absent(label, announced, scoped)}")
        theirs = tuple(json.loads(scoped.get(f"members/{other}").decode()))
        if theirs != label.members:
            raise TransferError(
                f"{label}: the members differ: rank {other} expects [{', '.join(theirs)}], "
                f"here it is [{', '.join(label.members)}]"
            )


def end_epoch(address: RendezvousAddress, *, name: str, epoch: int, reason: str, timeout_s: float) -> None:
    """Free the members of an epoch that wait for one that will not come: their `join` or `agree` raises TransferError.

    Called by whoever knows that a member is gone; needs no membership. Broadcasts under way are not touched, since the
    connections of a dead process end them. DeadlineExceeded if the rendezvous does not answer.
    """
    store = reach_rendezvous(address, timeout_s)
    PrefixStore(f"{name}/{epoch}", store).set(_OVER, reason)


def _refuse_over(label: GroupLabel, scoped: Store) -> None:
    if scoped.check([_OVER]):
        raise TransferError(f"{label}: this epoch is over: {scoped.get(_OVER).decode()}")


def _refuse_ended(label: GroupLabel, announced: Store, scoped: Store) -> None:
    _refuse_over(label, scoped)
    for other in range(len(label.members)):
        if announced.check([f"announced/{other}"]):
            epoch, member = json.loads(announced.get(f"announced/{other}").decode())
            if epoch > label.epoch:
                raise TransferError(f"{label}: {member} is at epoch {epoch} already; this epoch is over")


def _absent(label: GroupLabel, announced: Store, scoped: Store) -> str:
    """Name the members that did not come, with the epoch that they announced last."""
    rows = []
    for other, member in enumerate(label.members):
        if not scoped.check([f"members/{other}"]):
            seen = "never seen"
            if announced.check([f"announced/{other}"]):
                epoch, who = json.loads(announced.get(f"announced/{other}").decode())
                seen = f"last seen as {who} in epoch {epoch}"
            rows.append(f"{member} (rank {other}, {seen})")
    return ", ".join(rows)


def _wait_for_key(store: Store, key: str, deadline: float, while_waiting: Callable[[], None] | None = None) -> bool:
    """Return True when the key is there, False when the time is up."""
    # Others are mostly a moment behind: short naps first, so that meeting them costs no more than that moment.
    nap_s = _POLL_S / 32
    while not store.check([key]):
        if while_waiting is not None:
            while_waiting()
        if time.monotonic() > deadline:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _POLL_S)
    return True


def _connect(
    backend: Backend, store: Store, rank: int, size: int, address: RendezvousAddress, timeout: timedelta
) -> Any:
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL  # only in builds with CUDA

        options = ProcessGroupNCCL.Options()
        # Beyond the limit that is kept here: torch's own watchdog ends the whole process.
        options._timeout = 10 * timeout
        return ProcessGroupNCCL(store, rank, size, options)
    gloo = cast(Any, ProcessGroupGloo)._Options()  # the only options that take a device
    gloo._devices = [_gloo_device(address)]
    gloo._timeout = timeout
    return ProcessGroupGloo(store, rank, size, gloo)


def _gloo_device(address: RendezvousAddress) -> Any:
    """Return the network device to use: that of `GLOO_SOCKET_IFNAME`, else the one that leads to the rendezvous.

    gloo's own choice is the address of the host name, which is a loopback address on many systems.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing; makes the kernel choose a source address
        return ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])
