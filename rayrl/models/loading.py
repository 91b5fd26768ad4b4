"""A model folder to a causal language model in memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from rayrl.errors import ModelError
from rayrl.models.folder import check_model_folder
from rayrl.models.quiet import silence_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_causal_lm(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    train: bool = False,
) -> "PreTrainedModel":
    """Return the model in the folder at `path`, on the CPU; never asks a hub.

    Args:
        path: model folder, as `rayrl models import` makes it.
        dtype: of all weights, whatever they are stored in.
        attention: implementation of attention, as transformers names it (`sdpa`, `eager`, `flash_attention_2`, ...).
        trust_remote_code: run code from the folder.
        train: training mode (dropout, if the model has any) instead of evaluation mode.

    Raises ModelError if the folder is missing, has no weights, or cannot be loaded.
    """
    info = check_model_folder(path)
    if not info.has_weights:
        raise ModelError(f"model folder {str(path)!r} has no weights (*.safetensors); import or copy it again")
    from transformers import AutoModelForCausalLM

    silence_progress_bars()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load the model in {str(path)!r}: {error}") from error
    return model.train(train)


def create_empty_causal_lm(path: str | Path, attention: str = "sdpa", trust_remote_code: bool = False) -> Any:
    """Return the model of the folder at `path` on the meta device: its structure, without weights."""
    check_model_folder(path)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, trust_remote_code=trust_remote_code
        )


def create_unloaded_causal_lm(path: str | Path, attention: str = "sdpa", trust_remote_code: bool = False) -> Any:
    """Return the model of the folder at `path` with parameters on the meta device, float32, and buffers as always.

    Embeddings that the config ties are one parameter.
    """
    check_model_folder(path)
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    return model
