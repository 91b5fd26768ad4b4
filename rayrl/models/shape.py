"""The numbers of a model's architecture that a layout over ranks must divide, read from its config.json only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrl.models.folder import check_model_folder, text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Example: `ModelShape(model_type="llama", num_heads=9, num_kv_heads=3, intermediate_size=1536, num_experts=0,
    vocab_size=49152)`."""

    model_type: str
    """As transformers names it."""
    num_heads: int
    num_kv_heads: int
    """Heads of keys and values; fewer than `num_heads` where they are grouped."""
    intermediate_size: int | None
    """Width of the feed-forward blocks; None if the config does not state it."""
    num_experts: int
    """Experts of each layer; 0 for dense models."""
    vocab_size: int


def read_model_shape(path: str | Path) -> ModelShape:
    """Return the shape of the model in a folder. ModelError if it is no model folder."""
    info = check_model_folder(path)
    config = text_config(json.loads((info.path / "config.json").read_text(encoding="utf-8")))
    heads = _first(config, "num_attention_heads", "n_head", "num_heads") or 1
    return ModelShape(
        model_type=info.model_type,
        num_heads=heads,
        num_kv_heads=_first(config, "num_key_value_heads", "num_kv_heads") or heads,
        intermediate_size=_first(config, "moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner"),
        num_experts=_first(config, "num_local_experts", "num_experts", "n_routed_experts") or 0,
        vocab_size=info.vocab_size,
    )


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
