"""LoRA: what is trained, published, saved, and what the reference is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import write_family
from gradient_cases import OPTIMIZERS, assert_same, two_steps
from ranks import RankPool
from samples import make_engine, random_batch, training_config, weights

from rayrl.config.model import ModelConfig
from rayrl.config.training import DeepSpeedEngine, LoraConfig, ParallelConfig, TrainingConfig
from rayrl.errors import CheckpointError, ModelError
from rayrl.inference.adapter_merge import AdapterMerge
from rayrl.infra.weight_manifest import spec_of
from rayrl.models.loading import load_causal_lm
from rayrl.training.engine_check import check_engine
from rayrl.training.losses import SupervisedLoss

pytest.importorskip("peft", reason="peft is not installed: pip install 'rayrl[lora]'")

_LORA = LoraConfig(r=4, alpha=8.0, target_modules=("q_proj", "down_proj"))
_ADAPTED = {f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")}


def _config(*, data: int = 1, lora: LoraConfig | None = _LORA, zero_stage: int | None = None) -> TrainingConfig:
    config = training_config(data=data, eps=1e-4).model_copy(update={"lora": lora})
    if zero_stage is None:
        return config
    engine = DeepSpeedEngine(type="deepspeed", zero_stage=zero_stage, logprob_chunk_tokens=8)
    return config.model_copy(update={"engine": engine})


def test_only_adapted_weights_move_and_they_are_published_merged_under_their_own_names(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, _config())
    before = dict(load_causal_lm(llama_folder).named_parameters())
    assert all(tensor.equal(before[name]) for name, tensor in weights(engine).items()), "adapters start at nothing"

    engine.train_step(random_batch(), SupervisedLoss())

    after = weights(engine)
    assert list(after) == list(before) == [spec.name for spec in engine.weight_specs("float32")]
    assert {name for name, tensor in after.items() if not tensor.equal(before[name])} == _ADAPTED
    for name in _ADAPTED:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 4


def test_a_model_of_the_merged_weights_gives_the_logprobs_of_the_adapted_one(
    llama_folder: Path, tmp_path: Path
) -> None:
    engine, batch = make_engine(llama_folder, _config()), random_batch()
    for _ in range(3):
        engine.train_step(batch, SupervisedLoss())

    engine.export_hf(tmp_path / "export")

    np.testing.assert_allclose(
        make_engine(tmp_path / "export").forward_logprobs(batch),
        engine.forward_logprobs(batch),
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_reference_is_the_model_without_adapters(llama_folder: Path) -> None:
    engine, batch = make_engine(llama_folder, _config(), with_reference=True), random_batch()
    initial = engine.forward_logprobs(batch, reference=True)

    engine.train_step(batch, SupervisedLoss())

    np.testing.assert_array_equal(engine.forward_logprobs(batch, reference=True), initial)
    assert abs(engine.forward_logprobs(batch) - initial).max() > 1e-3


def test_adapters_are_saved_and_training_goes_on_bit_equal(llama_folder: Path, tmp_path: Path) -> None:
    engine, batch = make_engine(llama_folder, _config()), random_batch()
    engine.train_step(batch, SupervisedLoss())
    engine.save(tmp_path / "state")
    engine.train_step(batch, SupervisedLoss())

    fresh = make_engine(llama_folder, _config())
    fresh.load(tmp_path / "state")
    fresh.train_step(batch, SupervisedLoss())

    expected = weights(engine)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(fresh).items())
    with pytest.raises(CheckpointError, match="another model"):
        make_engine(llama_folder).load(tmp_path / "state")


def test_targets_that_match_nothing_are_refused_with_the_names_that_exist(llama_folder: Path) -> None:
    lora = LoraConfig(target_modules=("q_proj", "q_prj"))

    with pytest.raises(ModelError, match=r"\['q_prj'\] match no linear layer.*did you mean 'q_proj'.*'down_proj'"):
        make_engine(llama_folder, _config(lora=lora))


def test_such_targets_are_refused_before_anything_starts(llama_folder: Path) -> None:
    config = _config(lora=LoraConfig(target_modules=("qkv",)))

    with pytest.raises(ModelError, match=r"\['qkv'\] match no linear layer"):
        check_engine(ModelConfig(path=str(llama_folder)), config)


def test_an_adapter_beside_the_output_head_is_refused_since_it_would_not_be_trained(untied_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"\['lm_head'\] match no linear layer of Llama\w+ that can be adapted"):
        make_engine(untied_folder, _config(lora=LoraConfig(target_modules=("q_proj", "lm_head"))))


def _two_steps(rank: int, world_size: int, folder: str, zero_stages: tuple[int, ...]) -> list[dict[str, Any]]:
    """One of FSDP and one of each ZeRO stage, the reference asked for first."""
    results = []
    for stage in (None, *zero_stages):
        config = _config(data=world_size, zero_stage=stage)
        engine = make_engine(Path(folder), config, rank=rank, world_size=world_size, with_reference=True)
        batch = random_batch()
        reference = engine.forward_logprobs(batch, reference=True)
        for _ in range(2):
            engine.train_step(batch, SupervisedLoss())
        again = engine.forward_logprobs(batch, reference=True)
        results.append({"weights": weights(engine), "reference": reference, "again": again})
    return results


@pytest.mark.distributed
@pytest.mark.deepspeed
def test_two_ranks_train_the_same_adapters_on_both_engines(
    llama_folder: Path, rank_pools: Mapping[int, RankPool]
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'rayrl[deepspeed]'")
    (expected,) = _two_steps(0, 1, str(llama_folder), ())

    ranks = rank_pools[2].run(_two_steps, str(llama_folder), (2, 3))

    for results in ranks:
        for actual in results:
            for name, tensor in expected["weights"].items():
                torch.testing.assert_close(actual["weights"][name], tensor, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(actual["reference"], expected["reference"], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(actual["again"], actual["reference"], rtol=1e-5, atol=1e-6)


_TARGETS = {
    "Phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "Mixtral": ("q_proj", "k_proj", "v_proj", "o_proj"),
}


def _lora_of(folder: str) -> LoraConfig:
    """Adapters beside all linear layers of the blocks."""
    targets = _TARGETS.get(Path(folder).name, LoraConfig().target_modules)
    return LoraConfig(r=4, alpha=8.0, target_modules=targets)


def _in_layout(rank: int, world_size: int, parallel: dict[str, int], folders: list[str], states: str) -> list[Any]:
    """Two steps of each model, and what is there after them."""
    results = []
    for number, folder in enumerate(folders):
        config = training_config(parallel=parallel, **OPTIMIZERS["linear"])
        config = config.model_copy(update={"lora": _lora_of(folder)})
        engine = make_engine(Path(folder), config, rank=rank, world_size=world_size, with_reference=True)
        batch, loss = random_batch(num_groups=4, group_size=4, seed=1), SupervisedLoss()
        result = two_steps(engine, batch, loss)
        # Before the first step B is 0 and A without gradient.
        result["gradients"] = engine.gradients(batch, loss)
        result["adapters"] = {name: tensor.clone() for name, tensor in engine.adapter_tensors()}
        result["reference"] = engine.forward_logprobs(batch, reference=True)
        engine.save(Path(states) / str(number))
        results.append(result)
    return results if rank == 0 else []


def _assert_those_of_one_rank(
    pools: Mapping[int, RankPool], parallel: dict[str, int], folders: list[Path], tmp_path: Path
) -> None:
    names = [str(folder) for folder in folders]
    pool = pools[ParallelConfig(**parallel).world_size]
    expected = _in_layout(0, 1, {"data": 1}, names, str(tmp_path / "alone"))

    actual = pool.run(_in_layout, parallel, names, str(tmp_path / "split"))[0]

    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert min(tensor.norm() for tensor in theirs["gradients"].values()) > 1e-3
        assert_same(ours, theirs)
        np.testing.assert_allclose(ours["reference"], theirs["reference"], rtol=1e-4, atol=1e-5)
        alone = make_engine(folders[number], _config(lora=_lora_of(names[number])))
        alone.load(tmp_path / "split" / str(number))
        for name, tensor in alone.adapter_tensors():
            torch.testing.assert_close(ours["adapters"][name], theirs["adapters"][name], rtol=1e-4, atol=1e-6)
            assert tensor.equal(ours["adapters"][name]), name


@pytest.mark.distributed
def test_tensor_ranks_train_the_adapters_of_one_rank(
    llama_folder: Path, rank_pools: Mapping[int, RankPool], tmp_path: Path
) -> None:
    _assert_those_of_one_rank(rank_pools, {"tensor": 2}, [llama_folder], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"data": 2, "tensor": 2}], ids=["tensor2", "data2-tensor2"])
def test_families_train_the_adapters_of_one_rank_on_tensor_ranks(
    parallel: dict[str, int], rank_pools: Mapping[int, RankPool], tmp_path: Path
) -> None:
    folders = [write_family(tmp_path / name, name) for name in ("Qwen2", "Qwen3", "Phi3", "Gemma2")]

    _assert_those_of_one_rank(rank_pools, parallel, folders, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 2}, {"tensor": 2, "expert_tensor": 2}, {"data": 2, "expert": 2}, {"context": 2}],
    ids=["tensor", "split", "spread", "context"],
)
def test_adapters_beside_experts_are_those_of_one_rank(
    parallel: dict[str, int], rank_pools: Mapping[int, RankPool], tmp_path: Path
) -> None:
    _assert_those_of_one_rank(rank_pools, parallel, [write_family(tmp_path / "Mixtral", "Mixtral")], tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_makes_of_the_adapters_the_very_weights_that_the_trainer_merges(llama_folder: Path, dtype) -> None:
    engine = make_engine(llama_folder, _config())
    engine.train_step(random_batch(), SupervisedLoss())
    merge = AdapterMerge("inference-0", ModelConfig(path=str(llama_folder), dtype=dtype), _LORA)
    merge.open()

    adapters = dict(engine.adapter_tensors())
    merge.check([(spec.name, spec.shape, spec.dtype) for spec in engine.adapter_specs()])
    merged = merge.merge(adapters, None)

    assert [spec_of(name, item) for name, item in adapters.items()] == list(engine.adapter_specs())
    assert len(adapters) == 2 * len(_ADAPTED)
    assert merge.specs == engine.weight_specs(dtype)
    for name, tensor in engine.weight_tensors(dtype):
        assert merged[name].equal(tensor), name


def test_there_are_no_adapters_to_publish_without_lora(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, _config(lora=None))

    assert engine.adapter_specs() == ()
    assert list(engine.adapter_tensors()) == []
