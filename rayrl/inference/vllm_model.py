"""What a vLLM engine knows of its model without vLLM: the weights to expect, the end tokens, and what can be asked."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrl.config.model import ModelConfig
from rayrl.inference import vllm_api
from rayrl.inference.request_check import ModelLimits
from rayrl.inference.weights import named_weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model folder, read by transformers."""

    weights: "dict[str, Tensor]"
    """All parameters by name, without values."""
    eos_token_ids: tuple[int, ...]
    """All ids that end a completion."""
    limits: ModelLimits
    """What requests may ask for."""


def read_model(model: ModelConfig) -> ServedModel:
    """Read the model folder; may take long. ModelError if that cannot be done."""
    import torch

    from rayrl.models.context import context_limit
    from rayrl.models.loading import create_empty_causal_lm
    from rayrl.models.tokenizer import load_tokenizer

    dtype: torch.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
    empty = create_empty_causal_lm(model.path, trust_remote_code=model.trust_remote_code).to(dtype)
    return ServedModel(
        weights=named_weights(empty),
        eos_token_ids=load_tokenizer(model.path, trust_remote_code=model.trust_remote_code).eos_token_ids,
        limits=ModelLimits(
            max_context=context_limit(model),
            vocab_size=empty.get_input_embeddings().num_embeddings,
            can_decode=True,
            can_penalize=True,
            can_guide=True,
            temperatures=vllm_api.TEMPERATURES,
        ),
    )
