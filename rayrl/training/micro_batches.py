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
    lengths: Sequence[int], num_ranks: int, token_budget: int, attention_cost: float = 0.0
) -> MicroBatchPlan:
    """Return a plan in which each row occurs once and rows of similar length go together.

    Rows times the longest length of a micro-batch are at most `token_budget`, unless it has a single row. Longest
    first, each row goes to the rank with the least cost so far.
    """
    assert num_ranks > 0 and token_budget > 0, "a plan needs ranks and a budget"
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    for index in longest_first:
        rank = costs.index(min(costs))
        shares[rank].append(index)
        costs[rank] += row_cost(lengths[index], attention_cost)
    cut = [_cut(share, lengths, token_budget) for share in shares]
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
