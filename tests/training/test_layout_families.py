"""Tensor and context ranks give the reference update for families whose plans, norms, biases and windows differ."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_cases import SMALL, Case, assert_same, reference_of, run_cases
from ranks import RankPool

_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {},  # norms over single heads
    "GPTNeoX": {"num_key_value_heads": None, "head_dim": None},  # one matrix for queries, keys and values; biases
    "Phi": {"head_dim": None},  # a head with a bias
    "Phi3": {},  # outputs of split matrices put together again
    "Olmo2": {"head_dim": None},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},  # bounded logits, every second layer with a window
    "Mistral": {"sliding_window": 5},
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {name: str(_write(root / name, name, options)) for name, options in _FAMILIES.items()}


def _write(folder: Path, name: str, options: dict[str, Any]) -> Path:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "head_dim": 8,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    chosen = {key: value for key, value in (sizes | options).items() if value is not None}
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**chosen))
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"context": 2}], ids=["tensor", "context"])
def test_families_give_the_reference_update(
    axes: dict[str, int], families: dict[str, str], rank_pools: Mapping[int, RankPool]
) -> None:
    cases = [Case(model=folder, loss="sft", budget=SMALL) for folder in families.values()]

    results = rank_pools[2].run(run_cases, axes, cases)[0]

    for name, case, actual in zip(families, cases, results, strict=True):
        try:
            assert_same(actual, reference_of(case))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
