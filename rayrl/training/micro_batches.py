"""Which rank processes which rows in which micro-batch. Pure and deterministic: every rank computes the whole plan.

All ranks get the same number of micro-batches, because each forward and backward of a sharded model is collective; a
rank with fewer gets empty ones, which still run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rayrl.training.rows import row_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """Rows by rank and micro-batch.

    Example, three rows on two ranks: `MicroBatchPlan(ranks=(((0,), (2,)), ((1,), ())))`.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """[num_ranks][num_micro_batches] indices of rows; an empty tuple is an empty micro-batch."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every rank; at least one."""
        return len(self.ranks[0])


def plan_micro_batches(
    lengths: Sequence[int], num_ranks: int, token_budget: int, attention_cost: float = 0.0, *, packed: bool = False
) -> MicroBatchPlan:
    """Return a plan in which each row occurs once. Longest first, each row goes to the rank with the least cost so far.

    A micro-batch has at most `token_budget` tokens unless it has a single row. Padded, these are its rows times its
    longest length, and rows of similar length go together. Packed, they are the sum of its lengths, and each row goes
    to the first micro-batch of its rank with room for it (first-fit decreasing: at most 11/9 of the fewest, plus one).
    """
    assert num_ranks > 0 and token_budget > 0, "a plan needs ranks and a budget"
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    for index in longest_first:
        rank = costs.index(min(costs))
        shares[rank].append(index)
        costs[rank] += row_cost(lengths[index], attention_cost)
    divide = _first_fit if packed else _cut
    cut = [divide(share, lengths, token_budget) for share in shares]
    num_micro_batches = max(1, *(len(parts) for parts in cut))
    return MicroBatchPlan(ranks=tuple(tuple(parts) + ((),) * (num_micro_batches - len(parts)) for parts in cut))


def _cut(share: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[tuple[int, ...]]:
    """Cut rows, longest first, into micro-batches: the first row of each decides how many fit."""
    parts: list[tuple[int, ...]] = []
    start = 0
    while start < len(share):
        num_rows = max(1, token_budget // max(lengths[share[start]], 1))
        parts.append(tuple(share[start : start + num_rows]))
        start += num_rows
    return parts


def _first_fit(share: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[tuple[int, ...]]:
    """Put rows, longest first, into the first micro-batch that has room."""
    parts: list[list[int]] = []
    room: list[int] = []
    for index in share:
        length = lengths[index]
        target = next((number for number, free in enumerate(room) if free >= length), None)
        if target is None:
            parts.append([index])
            room.append(token_budget - length)
        else:
            parts[target].append(index)
            room[target] -= length
    return [tuple(part) for part in parts]
