"""Rows: what one line of a forward pass holds. The trajectories of a group share the tokens of their prompt.

    plain      [ prompt  completion ]
    shared     [ prompt  completion a  completion b  completion c ]

In a shared row each completion sees the prompt and itself, and its positions go on from the prompt's: its logprobs and
gradients are those of a plain row, since with causal attention nothing in the prompt depends on what follows it. A
group of 8 with a prompt of 60 tokens and completions of 16 takes 188 tokens instead of 608. Attention costs more, as
it is computed between completions and thrown away; `plan_rows` weighs the two.

The last token with loss is only predicted, never read: rows end before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayrl.training.batch import IntArray, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Trajectories that are processed in one row.

    Example: `Row(trajectories=(4, 5), num_shared=60, ends=(75, 70), length=85)`.
    """

    trajectories: tuple[int, ...]
    """Indices into the batch."""
    num_shared: int
    """Leading tokens that stand in the row once; 0 in a plain row."""
    ends: tuple[int, ...]
    """Tokens of each trajectory that are read; the token at this position is the last that is predicted."""
    length: int
    """Tokens in the row."""

    @property
    def is_shared(self) -> bool:
        """Whether it needs a mask of its own."""
        return len(self.trajectories) > 1


def row_cost(length: float, attention_cost: float) -> float:
    """Return the time of a row in units of one token's matrix products: linear, plus attention between all pairs.

    Args:
        attention_cost: time of one pair in these units, for a model with hidden size d about 1 / (6 d).
    """
    return length + attention_cost * length * length


def plan_rows(batch: TrainBatch, *, share: bool, attention_cost: float, max_tokens: int) -> tuple[Row, ...]:
    """Return the rows of a batch; trajectories without a token that carries loss are left out.

    Args:
        share: allow shared rows.
        attention_cost: see `row_cost`.
        max_tokens: no shared row is longer.
    """
    firsts, ends = _loss_bounds(batch)
    members = np.flatnonzero(ends > 0)
    if not share:
        return tuple(_plain(int(index), int(ends[index])) for index in members)
    rows: list[Row] = []
    for group in dict.fromkeys(batch.group_ids[members].tolist()):
        of_group = members[batch.group_ids[members] == group]
        rows.extend(_rows_of_group(batch, of_group, firsts, ends, attention_cost, max_tokens))
    return tuple(rows)


def _plain(index: int, end: int) -> Row:
    return Row(trajectories=(index,), num_shared=0, ends=(end,), length=end)


def _rows_of_group(
    batch: TrainBatch, members: IntArray, firsts: IntArray, ends: IntArray, attention_cost: float, max_tokens: int
) -> list[Row]:
    """Return the cheapest division of one group into rows of equal numbers of trajectories."""
    num_shared = _common_prefix(batch, members, int(firsts[members].min()))
    best = [_plain(int(index), int(ends[index])) for index in members]
    best_cost = sum(row_cost(row.length, attention_cost) for row in best)
    num_rows = 1
    while num_shared > 0 and num_rows < len(members):
        parts = np.array_split(members, num_rows)
        rows = [_shared(part, num_shared, ends) for part in parts]
        cost = sum(row_cost(row.length, attention_cost) for row in rows)
        if cost < best_cost and max(row.length for row in rows) <= max_tokens:
            best, best_cost = rows, cost
        num_rows *= 2
    return best


def _shared(members: IntArray, num_shared: int, ends: IntArray) -> Row:
    chosen = ends[members]
    if len(members) == 1:
        return _plain(int(members[0]), int(chosen[0]))
    return Row(
        trajectories=tuple(members.tolist()),
        num_shared=num_shared,
        ends=tuple(chosen.tolist()),
        length=int(num_shared + (chosen - num_shared).sum()),
    )


def _common_prefix(batch: TrainBatch, members: IntArray, limit: int) -> int:
    """Return how many leading tokens, at most `limit`, are the same in all members."""
    starts = batch.offsets[members]
    head = np.stack([batch.tokens[start : start + limit] for start in starts])
    differs = (head != head[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else limit


def _loss_bounds(batch: TrainBatch) -> tuple[IntArray, IntArray]:
    """Return [N] positions in the trajectory of the first and of the last token with loss; 0 where there is none."""
    num = batch.num_trajectories
    firsts, lasts = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
    flat = np.flatnonzero(batch.loss_mask)
    owner = np.searchsorted(batch.offsets, flat, side="right") - 1
    position = flat - batch.offsets[owner]
    lasts[owner] = position  # of equal owners the last assignment stays, and positions ascend
    firsts[owner[::-1]] = position[::-1]
    return firsts, lasts


def row_lengths(rows: Sequence[Row]) -> tuple[int, ...]:
    """Return the lengths of rows."""
    return tuple(row.length for row in rows)
