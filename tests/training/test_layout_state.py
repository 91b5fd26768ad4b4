"""Training states and model folders written in one layout are read in another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_cases import OPTIMIZERS
from ranks import RankPool
from samples import make_engine, random_batch, training_config, weights, write_llama, write_moe

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.training import gradients
from rayrl.training.losses import PolicyLoss
from rayrl.training.sharded_load import load_parts

_ALONE: dict[str, int] = {"data": 1}
_SPLIT: dict[str, int] = {"tensor": 2, "expert_tensor": 2}
_SPREAD_AND_SPLIT: dict[str, int] = {"data": 2, "expert": 2} | _SPLIT
_SPLIT_CASE = pytest.param("moe", _SPLIT, marks=pytest.mark.slow, id="split")


def _engine(rank: int, world_size: int, parallel: dict[str, int], model: str, **options: Any) -> Any:
    config = training_config(parallel=parallel, **OPTIMIZERS["linear"], **options)
    return make_engine(Path(model), config, rank=rank, world_size=world_size)


def _step(engine: Any) -> float:
    loss: float = engine.train_step(random_batch(), PolicyLoss(AlgorithmConfig(), 16)).loss
    return loss


def _write(rank: int, world_size: int, parallel: dict[str, int], model: str, folder: str) -> dict[str, Any]:
    """Two steps, save and export, and two more steps."""
    torch.manual_seed(11 + rank)
    engine = _engine(rank, world_size, parallel, model)
    _step(engine)
    _step(engine)
    engine.save(Path(folder) / "state")
    engine.export_hf(Path(folder) / "export")
    saved = weights(engine)
    losses = [_step(engine) for _ in range(2)]
    return {"saved": saved, "losses": losses, "weights": weights(engine), "random": torch.rand(4)}


def _read(rank: int, world_size: int, parallel: dict[str, int], model: str, folder: str) -> dict[str, Any]:
    """Load into a fresh engine, and make the same two steps."""
    torch.manual_seed(99)
    engine = _engine(rank, world_size, parallel, model)
    engine.load(Path(folder) / "state")
    loaded = weights(engine)
    losses = [_step(engine) for _ in range(2)]
    return {"loaded": loaded, "losses": losses, "weights": weights(engine), "random": torch.rand(4)}


def _in_layout(pools: Mapping[int, RankPool], function: Any, parallel: dict[str, int], *args: str) -> dict[str, Any]:
    size = parallel.get("data", 1) * parallel.get("tensor", 1) * parallel.get("context", 1)
    if size == 1:
        result: dict[str, Any] = function(0, 1, parallel, *args)
        return result
    return pools[size].run(function, parallel, *args)[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": str(write_llama(root / "dense", tied=True, vocab_size=64)),
        "moe": str(write_moe(root / "moe", "Qwen3Moe")),
    }


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        pytest.param("dense", {"tensor": 2}, id="tensor"),
        pytest.param("dense", {"context": 2}, id="context"),
        pytest.param("moe", {"data": 2, "expert": 2}, id="expert"),
        _SPLIT_CASE,
    ],
)
def test_a_run_goes_on_bit_equal_in_the_same_layout(
    model: str, parallel: dict[str, int], models: dict[str, str], rank_pools: Mapping[int, RankPool], tmp_path: Path
) -> None:
    expected = _in_layout(rank_pools, _write, parallel, models[model], str(tmp_path))

    actual = _in_layout(rank_pools, _read, parallel, models[model], str(tmp_path))

    assert actual["losses"] == expected["losses"]
    assert actual["random"].equal(expected["random"])
    for name, tensor in expected["weights"].items():
        assert actual["weights"][name].equal(tensor), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("dense", {"data": 2}, _ALONE),
        ("dense", {"tensor": 2}, {"data": 2}),
        ("moe", {"data": 2, "expert": 2}, {"tensor": 2}),
        pytest.param("dense", _ALONE, {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param("moe", {"data": 2}, {"data": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param("moe", _SPLIT, {"data": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param("moe", _ALONE, _SPLIT, marks=pytest.mark.slow),
        pytest.param("moe", _SPREAD_AND_SPLIT, _SPLIT, marks=pytest.mark.slow),
    ],
    ids=[
        "data2-one",
        "tensor2-data2",
        "expert2-tensor2",
        "one-tensor2",
        "data2-expert2",
        "split2-expert2",
        "one-split2",
        "expert2-split2",
    ],
)
def test_another_layout_goes_on_with_the_same_weights_and_moments(
    model: str,
    before: dict[str, int],
    after: dict[str, int],
    models: dict[str, str],
    rank_pools: Mapping[int, RankPool],
    tmp_path: Path,
) -> None:
    expected = _in_layout(rank_pools, _write, before, models[model], str(tmp_path))

    actual = _in_layout(rank_pools, _read, after, models[model], str(tmp_path))

    for name, tensor in expected["saved"].items():
        assert actual["loaded"][name].equal(tensor), name
        torch.testing.assert_close(actual["weights"][name], expected["weights"][name], rtol=1e-4, atol=1e-6)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-4, abs=1e-6)


def _load_folder(rank: int, world_size: int, parallel: dict[str, int], folder: str) -> dict[str, Any]:
    """What the folder gives when each rank reads its own parts."""
    engine = _engine(rank, world_size, parallel, folder, sharded_load=True)
    return {"weights": weights(engine), "logprobs": engine.forward_logprobs(random_batch())}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        pytest.param("dense", {"tensor": 2}, id="tensor"),
        pytest.param("moe", {"data": 2, "expert": 2}, id="expert"),
        _SPLIT_CASE,
    ],
)
def test_an_exported_folder_has_the_weights_of_the_layout_and_is_read_in_parts(
    model: str, parallel: dict[str, int], models: dict[str, str], rank_pools: Mapping[int, RankPool], tmp_path: Path
) -> None:
    written = _in_layout(rank_pools, _write, parallel, models[model], str(tmp_path))
    folder = str(tmp_path / "export")

    alone = make_engine(Path(folder))
    parts = _in_layout(rank_pools, _load_folder, parallel, folder)

    for name, tensor in written["saved"].items():
        assert weights(alone)[name].equal(tensor), name
        assert parts["weights"][name].equal(tensor), name
    np.testing.assert_allclose(parts["logprobs"], alone.forward_logprobs(random_batch()), rtol=1e-4, atol=1e-5)


def _bytes_read(rank: int, world_size: int, parallel: dict[str, int], folder: str) -> tuple[int, int]:
    """Bytes that one rank reads of a folder, and bytes of the parts that it holds."""
    engine = _engine(rank, world_size, parallel, folder, sharded_load=True)
    held = sum(gradients.local(weight).nbytes for weight in engine._weights.values())
    return load_parts(engine._weights, Path(folder)), held


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        pytest.param("dense", {"tensor": 2}, id="tensor"),
        pytest.param("moe", {"data": 2, "expert": 2}, id="expert"),
        _SPLIT_CASE,
    ],
)
def test_a_rank_reads_no_more_than_it_holds(
    model: str, parallel: dict[str, int], models: dict[str, str], rank_pools: Mapping[int, RankPool]
) -> None:
    whole = sum(tensor.nbytes for tensor in weights(make_engine(Path(models[model]))).values())

    ranks = rank_pools[2].run(_bytes_read, parallel, models[model])

    for read, held in ranks:
        assert read == held
        assert read < 0.6 * whole
