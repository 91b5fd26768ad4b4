"""Packed rows: the logprobs of sequences alone, nothing from neighbours, no room wasted."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from families import tiny_family
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import make_engine, random_batch, training_config, trajectory
from torch import nn

from rayrl.training import attention
from rayrl.training.batch import TrainBatch, batch_from_arrow
from rayrl.training.collate import collate
from rayrl.training.logprobs import HeadSettings
from rayrl.training.losses import SupervisedLoss
from rayrl.training.micro_batches import plan_micro_batches
from rayrl.training.pack import Block, Pack, packed_attention
from rayrl.training.policy_model import PolicyModel, can_pack
from rayrl.training.rows import plan_rows
from rayrl.types.arrow import trajectories_to_batch

_CPU = torch.device("cpu")


def _batch(completions: list[list[int]], prompts: list[list[int]]) -> TrainBatch:
    items = [trajectory(number, prompts[number], tokens) for number, tokens in enumerate(completions)]
    return batch_from_arrow([trajectories_to_batch(items)])[0]


def test_sequences_stand_end_to_end_with_positions_of_their_own() -> None:
    batch = _batch([[10, 11], [20, 21, 22], [30, 31]], [[2, 3], [4], [5, 6]])

    micro = collate(batch, plan_rows(batch, share=False, attention_cost=0.0, max_tokens=100), _CPU, packed=True)

    assert micro.input_ids.tolist() == [[2, 3, 10, 4, 20, 21, 5, 6, 30]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2]]
    assert isinstance(micro.attention_mask, Pack)
    (block,) = micro.attention_mask.blocks
    assert (block.start, block.count, block.length, block.mask) == (0, 3, 3, None)
    assert micro.attention_mask.bounds == (0, 3, 6, 9)


@given(seed=st.integers(0, 10_000), share=st.booleans())
@settings(deadline=None, max_examples=20)
def test_each_prediction_stands_once_and_behind_the_token_before_it(seed: int, share: bool) -> None:
    batch = random_batch(seed=seed)
    rows = plan_rows(batch, share=share, attention_cost=0.0, max_tokens=64)

    micro = collate(batch, rows, _CPU, packed=True)

    flat = micro.flat.numpy()
    assert sorted(flat.tolist()) == np.flatnonzero(batch.loss_mask).tolist()
    assert micro.targets.tolist() == batch.tokens[flat].tolist()
    assert micro.input_ids.flatten()[micro.sources].tolist() == batch.tokens[flat - 1].tolist()
    assert micro.input_ids.numel() == sum(row.length for row in rows)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
def test_tokens_of_a_sequence_leave_its_pack_neighbours_bit_equal(llama_folder: Path, share: bool) -> None:
    prompts = [[2, 3, 4, 5], [2, 3, 4, 5], [7, 8], [9]]
    completions = [[10, 11, 12], [20, 21], [30, 31, 32, 33], [40, 41, 42]]
    engine = make_engine(llama_folder, share_prompts=share)

    def logprobs(of: list[list[int]]) -> np.ndarray:
        items = [
            trajectory(max(number - 1, 0), prompts[number], tokens, sample_index=number)
            for number, tokens in enumerate(of)
        ]
        return engine.forward_logprobs(batch_from_arrow([trajectories_to_batch(items)])[0])

    before = logprobs(completions)
    after = logprobs([completions[0], [50, 51], *completions[2:]])

    changed = slice(11, 13)
    assert before[changed].tolist() != after[changed].tolist()
    assert np.delete(before, changed).tolist() == np.delete(after, changed).tolist()


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("budget", [8192, 40], ids=["large", "small"])
def test_packed_and_padded_batches_give_the_same_logprobs_and_gradients(
    llama_folder: Path, share: bool, budget: int
) -> None:
    batch = random_batch(num_groups=4, seed=3)
    padded, packed = (
        make_engine(llama_folder, training_config(micro_batch_tokens=budget, packing=packing), share_prompts=share)
        for packing in (False, True)
    )

    np.testing.assert_allclose(packed.forward_logprobs(batch), padded.forward_logprobs(batch), rtol=1e-4, atol=1e-5)
    expected = padded.gradients(batch, SupervisedLoss())
    for name, gradient in packed.gradients(batch, SupervisedLoss()).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_packed_batches_process_no_padding(llama_folder: Path) -> None:
    batch = random_batch(num_groups=4, seed=3)
    rows = plan_rows(batch, share=False, attention_cost=0.0, max_tokens=8192)

    result = make_engine(llama_folder, share_prompts=False).train_step(batch, SupervisedLoss())

    assert result.num_processed_tokens == sum(row.length for row in rows)


def test_longer_sequences_take_the_other_attention_and_give_the_same(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch()
    engine = make_engine(llama_folder)
    dense = engine.forward_logprobs(batch)

    monkeypatch.setattr("rayrl.training.attention.MAX_DENSE_LENGTH", 4)

    np.testing.assert_allclose(engine.forward_logprobs(batch), dense, rtol=1e-4, atol=1e-5)


def test_padding_behind_the_last_sequence_has_no_attention() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    pack = Pack(blocks=(Block(start=0, count=2, length=3, mask=None), Block(start=6, count=1, length=2, mask=None)))

    output = packed_attention(nn.Identity(), query, key, value, pack, attention.attention)

    assert output.shape == (1, 9, 4, 8)
    assert output[:, 8:].eq(0).all()
    for start, end in ((0, 3), (3, 6), (6, 8)):
        part = [states[:, :, start:end] for states in (query, key, value)]
        alone, _ = attention.attention(nn.Identity(), *part, None)
        torch.testing.assert_close(output[:, start:end], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Qwen2", "Mixtral"])
def test_windows_hold_inside_packed_sequences(name: str) -> None:
    lm = tiny_family(name, window=4)
    lm.set_attn_implementation(attention.register())
    model = PolicyModel(lm, HeadSettings(temperature=1.0))
    batch = random_batch(seed=5)
    rows = plan_rows(batch, share=False, attention_cost=0.0, max_tokens=1000)
    assert can_pack(model)
    assert max(row.length for row in rows) > 8

    with torch.no_grad():
        packed = collate(batch, rows, _CPU, packed=True)
        together = dict(zip(packed.flat.tolist(), model(packed)[0].tolist(), strict=True))
        for row in rows:
            micro = collate(batch, [row], _CPU)
            for where, logprob in zip(micro.flat.tolist(), model(micro)[0].tolist(), strict=True):
                assert together[where] == pytest.approx(logprob, rel=1e-4, abs=1e-5)


@given(lengths=st.lists(st.integers(1, 300), max_size=60), num_ranks=st.integers(1, 5), budget=st.integers(1, 1000))
@settings(deadline=None)
def test_packed_plans_hold_every_row_once_within_the_budget(lengths: list[int], num_ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks, budget, packed=True)

    assert sorted(row for rank in plan.ranks for micro in rank for row in micro) == list(range(len(lengths)))
    assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
    for rank in plan.ranks:
        for micro in rank:
            assert sum(lengths[row] for row in micro) <= budget or len(micro) == 1
        # First fit leaves no two neighbours that would fit together.
        full = [sum(lengths[row] for row in micro) for micro in rank if micro]
        assert all(first + second > budget for first, second in pairwise(full))


def test_ranks_are_balanced_by_the_cost_of_attention_and_not_by_tokens() -> None:
    plan = plan_micro_batches([100, *[10] * 20], 2, 1000, attention_cost=0.1, packed=True)

    tokens = [sum([100, *[10] * 20][row] for micro in rank for row in micro) for rank in plan.ranks]
    assert tokens == [100, 200]


def test_a_model_with_state_along_the_row_is_not_packed() -> None:
    lm = tiny_family("Qwen2")
    lm.set_attn_implementation(attention.register())
    model = PolicyModel(lm, HeadSettings(temperature=1.0))
    assert can_pack(model)

    lm.config.layer_types = ["linear_attention", "full_attention"]

    assert not can_pack(model)
