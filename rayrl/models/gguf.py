"""A GGUF file to an ordinary model folder: dense safetensors, tokenizer and chat template."""

from pathlib import Path
from typing import Any, Literal

from rayrl.errors import ModelError
from rayrl.utils.logger import get_logger

_log = get_logger("models")

# Tokenizers whose original pre-tokenizer takes each digit apart, by the name that GGUF gives them. The conversion
# in transformers keeps only the byte-level split, which encodes runs of spaces before a number differently.
_SPLITS_DIGITS = ("smollm",)


def convert_gguf(file: Path, target: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    """Write the model in `file` to the existing folder `target`; quantized weights are made dense.

    Raises ModelError if the file cannot be read or the `gguf` package is missing.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("GGUF files need the gguf package: pip install 'rayrl[gguf]'") from error
    import torch
    from transformers import AutoTokenizer

    try:
        pre_tokenizer = GGUFReader(str(file)).get_field("tokenizer.ggml.pre")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read GGUF file {str(file)!r}: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        model = _load_dense(file)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"transformers cannot convert GGUF file {str(file)!r}: {error}") from error
    if pre_tokenizer is not None and pre_tokenizer.contents() in _SPLITS_DIGITS:
        _split_digits(tokenizer)
    model.to({"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]).save_pretrained(target)
    # Without it the tokenizer would claim no limit at all.
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target)
    _log.info("converted %s: %d parameters as %s", file.name, model.num_parameters(), dtype)


def _load_dense(file: Path) -> Any:
    """Return a plain model without trace of the quantization, which could neither be saved nor loaded again."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), **options)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = file.stem
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
