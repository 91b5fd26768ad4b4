"""Layouts that a model does not fit are refused with the numbers and what to change."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from samples import training_config

from rayrl.config.training import LoraConfig, ParallelConfig, TrainingConfig
from rayrl.errors import ConfigError, EngineError
from rayrl.models.shape import ModelShape, read_model_shape
from rayrl.training.layout_check import check_layout, describe_layout


def _shape(**overrides: Any) -> ModelShape:
    values: dict[str, Any] = {
        "model_type": "llama",
        "num_heads": 12,
        "num_kv_heads": 4,
        "intermediate_size": 96,
        "num_experts": 0,
        "vocab_size": 1000,
    }
    return ModelShape(**(values | overrides))


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({}, "1 workers = data 1"),
        ({"data": 2, "tensor": 4}, "8 workers = data 2 x tensor 4"),
        ({"tensor": 2, "context": 2}, "4 workers = tensor 2 x context 2"),
        ({"replicate": 2, "data": 2}, "4 workers = data 2 x replicate 2"),
    ],
)
def test_a_layout_that_fits_is_described(axes: dict[str, int], text: str) -> None:
    assert check_layout(training_config(parallel=axes), _shape()) == text


def test_experts_are_spread_inside_the_data_ranks() -> None:
    config = training_config(parallel={"data": 4, "expert": 2})

    assert check_layout(config, _shape(model_type="mixtral", num_experts=8)) == "4 workers = data 4, expert 2 inside"


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_split_inside_the_tensor_ranks(model_type: str) -> None:
    config = training_config(parallel={"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2})

    said = check_layout(config, _shape(model_type=model_type, num_experts=8))

    assert said == "4 workers = data 2 x tensor 2, expert 2 inside, expert_tensor 2 inside"


@pytest.mark.parametrize(
    ("axes", "model", "said"),
    [
        ({"tensor": 3}, {}, r"tensor=3 must divide the 12 attention heads and the 4 key-value heads.*1 or 2 or 4"),
        ({"tensor": 8}, {}, r"tensor=8 must divide the 12"),
        ({"tensor": 2}, {"intermediate_size": 97}, r"tensor=2 does not divide the intermediate size 97"),
        ({"tensor": 2}, {"model_type": "gpt2"}, r"no.*plan|does not have for gpt2"),
        ({"context": 3}, {}, r"context=3 must divide the 12 attention heads and the 4 key-value heads"),
        ({"context": 4, "tensor": 2}, {}, r"context \(4\) x tensor=8 must divide the 12"),
        ({"data": 2, "expert": 2}, {}, r"expert=2 spreads experts, but llama has none"),
        ({"data": 3, "expert": 3}, {"model_type": "mixtral", "num_experts": 8}, r"expert=3 does not divide the 8 exp"),
        ({"tensor": 2, "expert_tensor": 2}, {}, r"expert_tensor=2 splits experts, but llama has none"),
        (
            {"tensor": 4, "expert_tensor": 4},
            {"model_type": "mixtral", "num_experts": 8, "intermediate_size": 98},
            r"^training.parallel.expert_tensor=4 does not divide the width 98 of experts .*to a divisor$",
        ),
        (
            {"tensor": 2, "expert_tensor": 2},
            {"model_type": "gpt_oss", "num_experts": 8},
            r"expert_tensor=2 splits experts.*the plan of transformers for gpt_oss does not",
        ),
    ],
)
def test_a_layout_is_refused_when_a_number_cannot_be_divided(
    axes: dict[str, int], model: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layout(training_config(parallel=axes), _shape(**model))


def test_families_that_put_heads_together_again_need_no_divisible_heads() -> None:
    assert check_layout(training_config(parallel={"tensor": 2}), _shape(model_type="phi3", num_heads=5, num_kv_heads=5))


def test_eager_attention_is_refused_with_context_ranks() -> None:
    with pytest.raises(ConfigError, match="attention=eager"):
        check_layout(training_config(parallel={"context": 2}, attention="eager"), _shape())


def test_offload_is_refused_for_one_worker_and_taken_for_two() -> None:
    with pytest.raises(ConfigError, match="cpu_offload=true needs two"):
        check_layout(training_config(cpu_offload=True), _shape())

    assert check_layout(training_config(data=2, cpu_offload=True), _shape()) == "2 workers = data 2"


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"data": 3, "expert": 2}, "expert=2 does not divide training.parallel.data=3"),
        (
            {"tensor": 4, "expert_tensor": 2},
            r"expert_tensor=2 splits experts .* training\.parallel\.tensor=4: set it to 1, or both",
        ),
    ],
)
def test_axes_that_contradict_each_other_are_refused_by_the_config(axes: dict[str, int], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ParallelConfig(**axes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": {"dropout": 0.1}}, r"training.lora.dropout=0.1 would make the logprobs.*differ"),
        (
            {"engine": {"type": "deepspeed"}, "parallel": {"context": 2}},
            r"deepspeed has the axis data only, but training.parallel sets \{'context': 2\}; .*type=fsdp",
        ),
    ],
)
def test_what_an_engine_or_adapters_cannot_do_is_refused_by_the_config(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainingConfig.model_validate({"optimizer": {"lr": 1e-3}} | changes)


def test_a_dropout_of_nothing_is_taken() -> None:
    assert LoraConfig.model_validate({"dropout": 0.0, "r": 4}).r == 4


def test_axes_that_do_not_multiply_to_the_size_of_the_group_are_refused() -> None:
    import torch

    from rayrl.training.layout import make_layout

    with pytest.raises(EngineError, match=r"makes 4 workers .*data 2 x context 1 x tensor 2.*but.*has 3"):
        make_layout(torch.device("cpu"), ParallelConfig(data=2, tensor=2), rank=0, world_size=3)


def test_workers_are_the_product_of_the_axes_without_those_of_experts() -> None:
    parallel = ParallelConfig(replicate=2, data=4, context=2, tensor=2, expert=4)

    assert (parallel.world_size, parallel.batch_ranks) == (32, 8)
    assert describe_layout(parallel) == "32 workers = data 4 x tensor 2 x context 2 x replicate 2, expert 4 inside"


def test_the_shape_of_a_model_is_read_from_its_folder(llama_folder: Path, tmp_path: Path) -> None:
    shape = read_model_shape(llama_folder)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    config = {"model_type": "mixtral", "vocab_size": 9, "num_hidden_layers": 1, "num_attention_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))

    assert (shape.num_heads, shape.num_kv_heads, shape.intermediate_size, shape.num_experts) == (4, 2, 48, 0)
    assert read_model_shape(tmp_path).num_experts == 8
    assert read_model_shape(tmp_path).num_kv_heads == 6
