"""ZeRO 1, 2 and 3 on two ranks: the update of one process, skipped steps, reload, publication."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool, run_on_ranks
from samples import make_engine, training_config, weights
from zero_cases import (
    ADAM,
    UPDATES,
    alone,
    batch_of,
    head_of,
    loss_of,
    publish,
    publish_in_buckets,
    read,
    reference,
    reload,
    skips,
    two_steps,
    update,
)

from rayrl.models.loading import load_causal_lm

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'rayrl[deepspeed]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

_RTOL, _ATOL = 1e-4, 1e-6


@pytest.fixture
def two_ranks(rank_pools: Mapping[int, RankPool]) -> RankPool:
    return rank_pools[2]


def _assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for part in ("gradients", "weights"):
        for name, tensor in expected[part].items():
            torch.testing.assert_close(
                actual[part][name], tensor, rtol=_RTOL, atol=_ATOL, msg=lambda text, name=name: f"{name}: {text}"
            )
    torch.testing.assert_close(actual["logprobs"], expected["logprobs"], rtol=_RTOL, atol=1e-5)
    for part in ("losses", "norms", "largest"):
        torch.testing.assert_close(actual[part], expected[part], rtol=_RTOL, atol=_ATOL)


def _expected(folder: Path, case: tuple[Any, ...]) -> dict[str, Any]:
    """One process without DeepSpeed, one micro-batch, plain rows."""
    loss, kind, _, _ = case
    engine = make_engine(folder, training_config(**ADAM), share_prompts=False, **head_of(loss))
    return two_steps(engine, batch_of(kind), loss_of(loss))


@pytest.mark.parametrize("case", UPDATES, ids=[f"{case[0]}-{case[1]}-{case[2]}" for case in UPDATES])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_give_the_update_of_one_process(
    llama_folder: Path, two_ranks: RankPool, stage: int, case: tuple[Any, ...]
) -> None:
    expected = _expected(llama_folder, case)

    for actual in two_ranks.run(update, str(llama_folder), stage, case):
        _assert_same(actual, expected)


@pytest.mark.parametrize(
    "options",
    [{"activation_checkpointing": True}, {"offload_optimizer": True}, {"packing": False}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_update_is_the_same_whatever_the_options(
    llama_folder: Path, two_ranks: RankPool, stage: int, options: dict[str, bool]
) -> None:
    expected = _expected(llama_folder, UPDATES[1])

    for actual in two_ranks.run(update, str(llama_folder), stage, UPDATES[1], options):
        _assert_same(actual, expected)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(
    llama_folder: Path, two_ranks: RankPool, stage: int, offload: bool
) -> None:
    for case in two_ranks.run(skips, str(llama_folder), stage, offload):
        assert case["skipped"] == [True, True]
        assert case["reasons"][0].startswith("loss is inf")
        assert case["reasons"][1].startswith("gradient norm is inf")
        assert case["steps"] == 1
        for name, tensor in case["before"].items():
            assert case["between"][name].equal(tensor), name
            assert case["after"][name].equal(case["plain"][name]), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_goes_on_bit_equal_after_save_and_load(
    llama_folder: Path, two_ranks: RankPool, stage: int, tmp_path: Path
) -> None:
    for case in two_ranks.run(reload, str(llama_folder), stage, str(tmp_path / "state")):
        assert case["actual"]["losses"] == case["expected"]["losses"]
        assert case["actual"]["random"].equal(case["expected"]["random"])
        for name, tensor in case["saved"].items():
            assert case["loaded"][name].equal(tensor), name
            assert case["actual"]["weights"][name].equal(case["expected"]["weights"][name]), name


def test_another_stage_and_one_rank_alone_read_the_same_state(
    llama_folder: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    model, state = str(llama_folder), str(tmp_path / "state")
    saved = two_ranks.run(reload, model, 3, state)[0]

    other_stage = two_ranks.run(read, model, 1, state)[0]
    (single,) = run_on_ranks(alone, 1, tmp_path, model, state)

    for case in (other_stage, single):
        for name, tensor in saved["saved"].items():
            assert case["loaded"][name].equal(tensor), name
            torch.testing.assert_close(
                case["actual"]["weights"][name], saved["expected"]["weights"][name], rtol=_RTOL, atol=_ATOL
            )


def test_the_reference_stays_where_training_started_when_parameters_are_divided(
    llama_folder: Path, two_ranks: RankPool
) -> None:
    for first, still, moved in two_ranks.run(reference, str(llama_folder)):
        torch.testing.assert_close(torch.from_numpy(still), torch.from_numpy(first), rtol=1e-5, atol=1e-6)
        assert abs(moved - first).max() > 1e-3


def test_divided_weights_are_published_whole_in_the_order_announced(
    llama_folder: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    named = dict(load_causal_lm(llama_folder, dtype=torch.bfloat16).named_parameters())

    for results in two_ranks.run(publish, str(llama_folder), str(tmp_path / "export")):
        assert [spec.name for spec in results["specs"]] == list(named) == [name for name, _ in results["published"]]
        for spec, (name, tensor) in zip(results["specs"], results["published"], strict=True):
            assert (spec.shape, spec.dtype) == (tuple(tensor.shape), "bfloat16")
            assert tensor.equal(named[name]), name

    exported = weights(make_engine(tmp_path / "export"))
    for name, tensor in load_causal_lm(llama_folder).named_parameters():
        assert exported[name].equal(tensor), name


def test_no_more_than_a_bucket_of_divided_weights_is_whole_at_once(llama_folder: Path, two_ranks: RankPool) -> None:
    alone = make_engine(llama_folder, training_config(**ADAM))
    alone.train_step(batch_of("ragged"), loss_of("grpo"))
    expected = weights(alone)
    bucket = 4 * max(tensor.numel() for tensor in expected.values())
    assert sum(4 * tensor.numel() for tensor in expected.values()) > 4 * bucket

    for results in two_ranks.run(publish_in_buckets, str(llama_folder), bucket):
        assert 0 < results["most"] <= bucket
        assert results["left"] < bucket
        for name, tensor in expected.items():
            torch.testing.assert_close(results["weights"][name], tensor, rtol=_RTOL, atol=_ATOL)
