"""What a rank called in a group, and where the ranks of a group differ first. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """One collective as one rank called it.

    Example: `CollectiveRecord(group="data", sequence=812, operation="all_reduce", shape="[1024]", dtype="float32",
    reduction="sum", place="fsdp_engine.py:140", time=1.7e9)`.
    """

    group: str
    """Name of the group: an axis of the mesh, `train` for all ranks, or the transfer group with its epoch."""
    sequence: int
    """Number of the call in the group on this rank, from 1."""
    operation: str
    shape: str
    """Of the tensors that must be alike on all ranks; empty where ranks may differ."""
    dtype: str
    reduction: str
    """`sum`, `avg`, ...; `from 0` for a source rank; empty for neither."""
    place: str
    """Python file and line of the call, the innermost outside torch."""
    time: float = 0.0
    """Seconds since the epoch on that rank's clock."""

    @property
    def call(self) -> tuple[str, str, str, str]:
        """What must be the same on all ranks."""
        return self.operation, self.shape, self.dtype, self.reduction

    def __str__(self) -> str:
        parts = [part for part in (self.shape, self.dtype, self.reduction) if part]
        return f"{self.operation} #{self.sequence} on {self.group} ({', '.join(parts)}) at {self.place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first call of a group in which its ranks differ."""

    group: str
    sequence: int
    odd: Mapping[str, CollectiveRecord | None]
    """The ranks in the minority, with what they call instead, or None where they do not come."""
    others: Mapping[str, CollectiveRecord]
    """The other ranks."""
    last: Mapping[str, CollectiveRecord | None]
    """The call before, of the ranks that do not come; None if they called nothing."""

    def __str__(self) -> str:
        """Example: `rank 3 calls all_reduce #812 on data where the others call all_gather: ...`."""
        absent = sorted(rank for rank, record in self.odd.items() if record is None)
        theirs = next(iter(self.others.values()))
        if absent:
            before = self.last[absent[0]]
            tail = "it has called nothing in this group" if before is None else f"its last call is {before}"
            names = _names(absent, "does not come", "do not come")
            where = f"{theirs.operation} #{self.sequence} on {self.group}"
            return f"{names} to {where}: the others wait in {theirs}; {tail}"
        mine = next(record for record in self.odd.values() if record is not None)
        names = _names(sorted(self.odd), "calls", "call")
        what = f"{names} {mine.operation} #{self.sequence} on {self.group} where the others call {theirs.operation}"
        if mine.operation == theirs.operation:
            pairs = zip(("shape", "data type", "reduction"), mine.call[1:], theirs.call[1:], strict=True)
            differing = [f"{name} {own} instead of {other}" for name, own, other in pairs if own != other]
            what = f"{names} {mine.operation} #{self.sequence} on {self.group} with {', '.join(differing)}"
        return f"{what}: {mine}; the others: {theirs}"


def first_divergence(records: Mapping[str, Sequence[CollectiveRecord]]) -> Divergence | None:
    """Return the first divergence of the ranks of each group, of the earliest one in time; None if there is none.

    Args:
        records: what each rank called, in order; of a long run only the last ones, as far as each remembers. A rank
            is in a group if it called anything there.
    """
    by_group: dict[str, dict[str, dict[int, CollectiveRecord]]] = defaultdict(dict)
    for rank, calls in records.items():
        for call in calls:
            by_group[call.group].setdefault(rank, {})[call.sequence] = call
    found = [item for group, ranks in by_group.items() if (item := divergence_in(group, ranks)) is not None]
    # A rank that calls something else explains others that wait, for it or for those that wait for it.
    return min(found, key=lambda item: (None in item.odd.values(), _start(item)), default=None)


def divergence_in(group: str, ranks: Mapping[str, Mapping[int, CollectiveRecord]]) -> Divergence | None:
    """Return the first divergence in one group; `ranks` has the calls of each by sequence number."""
    if len(ranks) < 2:
        return None
    first = max(min(calls, default=1) for calls in ranks.values())
    last = max(max(calls, default=0) for calls in ranks.values())
    for sequence in range(first, last + 1):
        present = {rank: calls[sequence] for rank, calls in ranks.items() if sequence in calls}
        common = Counter(record.call for record in present.values()).most_common(1)[0][0]
        others = {rank: record for rank, record in present.items() if record.call == common}
        odd: dict[str, CollectiveRecord | None] = {
            rank: record for rank, record in present.items() if record.call != common
        }
        if not odd:
            odd = dict.fromkeys(rank for rank in ranks if rank not in present)
        if odd:
            before = {rank: ranks[rank].get(sequence - 1) for rank in odd}
            return Divergence(group=group, sequence=sequence, odd=odd, others=others, last=before)
    return None


def _start(item: Divergence) -> float:
    return min(record.time for record in item.others.values())


def _names(ranks: Sequence[str], one: str, many: str) -> str:
    return f"{ranks[0]} {one}" if len(ranks) == 1 else f"{', '.join(ranks)} {many}"
