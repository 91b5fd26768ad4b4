"""Notes each collective of this process before it starts, and in check mode compares it with the other ranks.

    caller ──note──> ring file (read by whoever diagnoses a hang)
               └───> side channel: a key of the rendezvous store for each rank, group and number ──> compare

The side channel is not the group: it works when the group hangs. A rank waits there until all have come to the same
number, or until `timeout_s`; then it raises what it knows.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rayrl.errors import CollectiveError
from rayrl.infra.collective_record import CollectiveRecord, divergence_in
from rayrl.infra.collective_ring import CollectiveRing

_POLL_S = 0.0005
_LIBRARIES = (sys.prefix, sys.base_prefix, "<")
_OWN_FILES = (__file__, str(Path(__file__).with_name("recorded_process_group.py")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """How the processes of a run record their collectives."""

    folder: str
    """Where each process writes its file; on a file system that whoever diagnoses can read."""
    checks: bool
    """Compare each collective with the other ranks before it starts."""
    timeout_s: float
    """How long one waits for the others there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannel:
    """Where ranks compare: a store that all of them reach, and how long one waits there for the others."""

    store: Any
    timeout_s: float


def open_recorder(folder: str, name: str, channel: SideChannel | None = None) -> "CollectiveRecorder":
    """Return the recorder of the process `name`, with its file in `folder`."""
    return CollectiveRecorder(CollectiveRing(Path(folder) / f"{name}.ring"), channel)


class CollectiveRecorder:
    """The recorder of one process; its groups share it."""

    def __init__(self, ring: CollectiveRing | None, channel: SideChannel | None = None) -> None:
        self._ring = ring
        self._channel = channel
        self._counts: Counter[str] = Counter()

    def note(
        self,
        operation: str,
        *,
        group: str,
        rank: int,
        members: Sequence[str],
        shape: str,
        dtype: str,
        reduction: str,
        compares: bool = True,
    ) -> None:
        """Record a call that is about to be made. CollectiveError in check mode if other ranks call something else.

        Args:
            rank: of this process in the group.
            members: how messages name the ranks of the group, by rank.
            compares: False for a group whose members share no side channel with this process.
        """
        self._counts[group] += 1
        record = CollectiveRecord(
            group=group,
            sequence=self._counts[group],
            operation=operation,
            shape=shape,
            dtype=dtype,
            reduction=reduction,
            place=calling_place(),
            time=time.time(),
        )
        if self._ring is not None:
            self._ring.write(record)
        if self._channel is not None and compares:
            self._compare(self._channel, record, rank, members)

    def close(self) -> None:
        """Let go of the file."""
        if self._ring is not None:
            self._ring.close()

    def _compare(self, channel: SideChannel, record: CollectiveRecord, rank: int, members: Sequence[str]) -> None:
        store, number = channel.store, record.sequence
        store.set(_key(record.group, number, rank), json.dumps(asdict(record)))
        if number > 2:
            # Whoever is at `number - 1` has read all of `number - 2`, and all have come to `number - 1`.
            store.delete_key(_key(record.group, number - 2, rank))
        deadline = time.monotonic() + channel.timeout_s
        seen: dict[str, dict[int, CollectiveRecord]] = {members[rank]: {number: record}}
        for other in range(len(members)):
            if other == rank:
                continue
            key = _key(record.group, number, other)
            while not store.check([key]):
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
            seen[members[other]] = _read(store, record.group, number, other)
        divergence = divergence_in(record.group, seen)
        if divergence is not None:
            is_late = None in divergence.odd.values()
            limit = f" (debug.collective_timeout_s={channel.timeout_s:g})" if is_late else ""
            raise CollectiveError(f"collectives diverge{limit}: {divergence}")


def calling_place() -> str:
    """Return `file.py:line` of the innermost frame that is neither in a library nor in this package's recorders."""
    frame: FrameType | None = sys._getframe(1)
    innermost = "unknown"
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _OWN_FILES:
            if not name.startswith(_LIBRARIES):
                return _place(name, frame.f_lineno)
            if innermost == "unknown":
                innermost = _place(name, frame.f_lineno)
        frame = frame.f_back
    return innermost


def _place(file: str, line: int) -> str:
    return f"{'/'.join(file.rsplit('/', 2)[-2:])}:{line}"


def _key(group: str, number: int, rank: int) -> str:
    return f"{group}/{number}/{rank}"


def _read(store: Any, group: str, number: int, rank: int) -> dict[int, CollectiveRecord]:
    """Return what a rank has told of a call and of the one before it."""
    found = {}
    for sequence in (number - 1, number):
        key = _key(group, sequence, rank)
        if sequence > 0 and store.check([key]):
            found[sequence] = CollectiveRecord(**json.loads(store.get(key)))
    return found
