"""Tiny random models of the families that training is tested with; importable in spawned processes."""

from pathlib import Path
from typing import Any

import torch
from samples import VOCAB

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "Gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.5, "sliding_window": 6},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.5},
    "GPTNeoX": {"num_key_value_heads": 4},
    "Mistral": {"sliding_window": None},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
FAMILIES = (
    "Llama",
    "Qwen2",
    "Qwen3",
    "Mistral",
    "Gemma",
    "Gemma2",
    "Phi",
    "Phi3",
    "GPTNeoX",
    "Olmo",
    "Mixtral",
    "Qwen3Moe",
)


def tiny_family(name: str, *, tied: bool = False, window: int | None = None) -> Any:
    """Return a random model, with weights large enough that its logits are far from uniform."""
    import transformers

    options = _SIZES | _EXTRA.get(name, {}) | {"tie_word_embeddings": tied}
    if window is not None:
        options |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
    torch.manual_seed(1)
    lm = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options))
    return lm.eval()


def write_family(folder: Path, name: str, *, tied: bool = False, window: int | None = None) -> Path:
    """Save such a model as a model folder."""
    tiny_family(name, tied=tied, window=window).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")  # a model folder is refused without one
    return folder
