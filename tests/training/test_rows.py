"""Rows: shared prompts where they pay, the same predictions in any case."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import random_groups, trajectory

from rayrl.training.batch import TrainBatch, batch_from_arrow
from rayrl.training.collate import collate
from rayrl.training.rows import Row, plan_rows
from rayrl.types.arrow import trajectories_to_batch

_CPU = torch.device("cpu")


def _batch(prompt: list[int], completions: list[list[int]]) -> TrainBatch:
    items = [trajectory(0, prompt, tokens, sample_index=index) for index, tokens in enumerate(completions)]
    return batch_from_arrow([trajectories_to_batch(items)])[0]


def test_a_group_shares_its_prompt_and_leaves_out_last_tokens() -> None:
    batch = _batch([2, 3, 4], [[10, 11], [12], [13, 14, 15]])

    rows = plan_rows(batch, share=True, attention_cost=0.0, max_tokens=100)

    assert rows == (Row(trajectories=(0, 1, 2), num_shared=3, ends=(4, 3, 5), length=6),)


def test_rows_stay_plain_when_attention_between_completions_costs_more() -> None:
    batch = _batch([2, 3], [[10] * 20, [11] * 20, [12] * 20, [13] * 20])

    rows = plan_rows(batch, share=True, attention_cost=1.0, max_tokens=1000)

    assert [row.trajectories for row in rows] == [(0,), (1,), (2,), (3,)]


def test_a_group_is_divided_when_its_row_would_exceed_the_limit() -> None:
    batch = _batch([2] * 10, [[10] * 5, [11] * 5, [12] * 5, [13] * 5])

    rows = plan_rows(batch, share=True, attention_cost=0.0, max_tokens=20)

    assert [row.trajectories for row in rows] == [(0, 1), (2, 3)]
    assert all(row.length <= 20 for row in rows)


def test_members_with_different_prompts_share_what_they_have_in_common() -> None:
    items = [trajectory(0, [2, 3, 4, 5], [9]), trajectory(0, [2, 3, 6, 5], [9])]
    batch, _ = batch_from_arrow([trajectories_to_batch(items)])

    rows = plan_rows(batch, share=True, attention_cost=0.0, max_tokens=100)

    assert [row.num_shared for row in rows] == [2]


def test_trajectories_without_loss_are_in_no_row() -> None:
    batch = _batch([2, 3], [[10, 11], [12]])
    masked = replace(batch, loss_mask=batch.loss_mask * (np.arange(len(batch.tokens)) >= 4))

    rows = plan_rows(masked, share=True, attention_cost=0.0, max_tokens=100)

    assert [row.trajectories for row in rows] == [(1,)]


@given(seed=st.integers(0, 10_000), share=st.booleans())
@settings(deadline=None, max_examples=30)
def test_each_prediction_stands_once_and_behind_the_token_before_it(seed: int, share: bool) -> None:
    batch, _ = batch_from_arrow(random_groups(seed=seed))
    rows = plan_rows(batch, share=share, attention_cost=0.0, max_tokens=64)

    micro = collate(batch, rows, _CPU)

    flat = micro.flat.numpy()
    assert sorted(flat.tolist()) == np.flatnonzero(batch.loss_mask).tolist()
    assert micro.targets.tolist() == batch.tokens[flat].tolist()
    assert micro.input_ids.flatten()[micro.sources].tolist() == batch.tokens[flat - 1].tolist()
    assert int(micro.loss_mask.sum()) == len(flat)


def test_a_completion_sees_the_prompt_and_itself_only() -> None:
    batch = _batch([2, 3], [[10, 11, 12], [20, 21]])
    rows = plan_rows(batch, share=True, attention_cost=0.0, max_tokens=100)

    micro = collate(batch, rows, _CPU)

    assert micro.attention_mask is not None
    assert micro.input_ids.tolist() == [[2, 3, 10, 11, 20]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert micro.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
