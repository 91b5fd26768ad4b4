"""What a context rank has of a micro-batch, and what becomes of predictions at the edge of its part."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from samples import random_batch

from rayrl.training.collate import collate, micro_shape
from rayrl.training.context_parallel import ContextParallel
from rayrl.training.rows import plan_rows


@dataclass
class _Rank:
    """The size of a group and a place in it."""

    number: int
    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.number


def _parts(micro: Any, num_ranks: int) -> list[Any]:
    groups: list[Any] = [_Rank(rank, num_ranks) for rank in range(num_ranks)]
    return [ContextParallel(group=group).shard(micro) for group in groups]


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_have_every_token_and_every_prediction_once(num_ranks: int, share: bool) -> None:
    batch = random_batch()
    rows = plan_rows(batch, share=share, attention_cost=0.0, max_tokens=200)
    micro = collate(batch, rows, torch.device("cpu"), multiple=num_ranks)

    parts = _parts(micro, num_ranks)

    assert torch.cat([part.input_ids for part in parts], dim=1).equal(micro.input_ids)
    assert torch.cat([part.position_ids for part in parts], dim=1).equal(micro.position_ids)
    assert torch.cat([part.predictions for part in parts]).sort().values.equal(torch.arange(len(micro.sources)))
    for part in parts:
        read = part.input_ids.flatten()[part.sources]
        assert read.equal(micro.input_ids.flatten()[micro.sources[part.predictions]])


def test_a_rank_may_have_nothing_to_predict() -> None:
    batch = random_batch(num_groups=1, group_size=1)
    rows = plan_rows(batch, share=False, attention_cost=0.0, max_tokens=200)
    micro = collate(batch, rows, torch.device("cpu"), multiple=4)

    counts = [len(part.predictions) for part in _parts(micro, 4)]

    assert sum(counts) == int(batch.loss_counts.sum())
    assert counts[0] == 0


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_rows_are_as_long_as_announced_also_in_an_empty_micro_batch(multiple: int) -> None:
    batch = random_batch()
    rows = plan_rows(batch, share=False, attention_cost=0.0, max_tokens=200)

    for chosen in (rows, ()):
        micro = collate(batch, chosen, torch.device("cpu"), multiple=multiple)

        assert tuple(micro.input_ids.shape) == micro_shape(chosen, multiple)
        assert micro.input_ids.shape[1] % multiple == 0
        assert np.all(micro.position_ids[:, 0].numpy() == 0)
