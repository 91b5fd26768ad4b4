"""Whole runs in other layouts and on the other engine end with the weights of the run with one training worker."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import small_run

from rayrl import Run
from rayrl.audit.report import audit_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(900)]

_STEPS = 3
_RTOL, _ATOL = 1e-4, 1e-6
_LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def _train(model: Path, root: Path, training: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train for `_STEPS` steps on what the weights before each step sampled, audit, and return the exported weights.

    The reward is earned by about half of what a random model answers, so that no group is without a gradient. The
    optimizer is the one whose changes follow the gradient (eps above its elements), as rounding differs by layout.
    """
    config = small_run(
        model,
        root,
        run={"name": "layout", "output_root": str(root), "seed": 5, "deterministic": True},
        reward={"type": "regex", "pattern": "^[0-5]"},
        driver__num_steps=_STEPS,
        driver__max_staleness=0,
        training={
            "optimizer": {"lr": 3e-2, "eps": 1e-1, "weight_decay": 0.1},
            "micro_batch_tokens": 48,
            **training,
        },
        transfer={"probe_every": 1},
    )

    result = Run(config).train()

    assert (result.status, result.steps) == ("done", _STEPS)
    report = audit_run(result.run_dir)
    assert report.passed, [finding for finding in report.findings if finding.verdict != "proven"]
    return load_file(result.run_dir / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def expected(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after the run with one worker."""
    weights = _train(small_model, tmp_path_factory.mktemp("reference"), {})
    before = load_file(small_model / "model.safetensors")
    assert all((tensor - before[name]).abs().max() > 1e-4 for name, tensor in weights.items()), "every weight moved"
    return weights


def _assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=_RTOL, atol=_ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [{"data": 2}, {"tensor": 2}, {"context": 2}], ids=["data", "tensor", "context"])
def test_two_workers_end_with_the_weights_of_one(
    parallel: dict[str, int], small_model: Path, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    _assert_same(_train(small_model, tmp_path, {"parallel": parallel}), expected)


@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_ends_with_the_weights_of_one_worker(
    stage: int, small_model: Path, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'rayrl[deepspeed]'")
    training = {"parallel": {"data": 2}, "engine": {"type": "deepspeed", "zero_stage": stage}}

    _assert_same(_train(small_model, tmp_path, training), expected)


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [{"data": 2}, {"tensor": 2}], ids=["data", "tensor"])
def test_adapters_on_two_workers_end_with_the_merged_weights_of_one(
    parallel: dict[str, int], small_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'rayrl[lora]'")
    before = load_file(small_model / "model.safetensors")

    alone = _train(small_model, tmp_path / "alone", {"lora": _LORA})
    together = _train(small_model, tmp_path / "together", {"lora": _LORA, "parallel": parallel})

    moved = {name for name, tensor in alone.items() if not tensor.equal(before[name])}
    assert {name.split(".")[-2] for name in moved} == set(_LORA["target_modules"])
    _assert_same(together, alone)


def _write_experts(folder: Path, tokenizer: Path) -> Path:
    """A random model with four experts in each of two layers, and the tokenizer of another folder."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=14,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        max_position_embeddings=32,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for file in tokenizer.glob("token*"):
        shutil.copy(file, folder / file.name)
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel", [{"data": 2, "expert": 2}, {"tensor": 2, "expert_tensor": 2}], ids=["spread", "split"]
)
def test_divided_experts_end_with_the_weights_of_one_worker(
    parallel: dict[str, int], small_model: Path, tmp_path: Path
) -> None:
    model = _write_experts(tmp_path / "model", small_model)

    alone = _train(model, tmp_path / "alone", {})
    together = _train(model, tmp_path / "together", {"parallel": parallel})

    before = load_file(model / "model.safetensors")
    assert all(not tensor.equal(before[name]) for name, tensor in alone.items() if ".experts." in name)
    _assert_same(together, alone)
