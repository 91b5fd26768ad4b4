"""What a model folder says about itself, read from its small JSON files only; loads no torch or transformers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrl.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model folder as its config describes it.

    Example: `ModelInfo(path=Path("models/smollm2-135m-instruct"), model_type="llama", max_context=8192,
    vocab_size=49152, num_layers=30, has_chat_template=True, has_weights=True)`
    """

    path: Path
    model_type: str
    """As transformers names it, for example `llama`."""
    max_context: int | None
    """Positions that the model was made for (`max_position_embeddings`), in tokens; None if it states no limit."""
    vocab_size: int
    """Rows of the embedding; may exceed the number of ids that the tokenizer has."""
    num_layers: int
    has_chat_template: bool
    has_weights: bool
    """There is at least one safetensors or PyTorch weight file."""


def check_model_folder(path: str | Path) -> ModelInfo:
    """Return what the folder at `path` holds.

    Raises ModelError if it is missing, has no readable config.json or no tokenizer; the message names the fix.
    """
    folder = Path(path)
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ModelError(f"model folder {str(folder)!r} {kind}; {_how_to_make(folder)}")
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelError(
            f"{str(folder)!r} has no config.json, so it is not a model folder; give the folder that "
            "`rayrl models import` made in model.path"
        )
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    if tokenizer_config is None and not (folder / "tokenizer.json").is_file():
        raise ModelError(f"model folder {str(folder)!r} has no tokenizer (tokenizer_config.json or tokenizer.json)")
    described = text_config(config)
    return ModelInfo(
        path=folder,
        model_type=str(config.get("model_type", "unknown")),
        max_context=_first_int(described, ("max_position_embeddings", "n_positions", "max_seq_len")),
        vocab_size=_required_int(described, ("vocab_size",), folder),
        num_layers=_required_int(described, ("num_hidden_layers", "n_layer", "num_layers"), folder),
        has_chat_template=_has_chat_template(folder, tokenizer_config or {}),
        has_weights=any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")),
    )


def _how_to_make(folder: Path) -> str:
    """Return what makes a folder of this name, if it is one that a run or the quickstart makes."""
    quickstart = "`rayrl models create-tiny models/quickstart-tiny && rayrl sft configs/quickstart_sft.yaml`"
    if folder.name == "export":
        made_by = f", for this one {quickstart}" if folder.parent.name == "quickstart-sft" else ""
        return (
            f"it is what a finished run leaves: first do the run whose run.name is {folder.parent.name!r}{made_by}, or "
            "give another folder in model.path (`make quickstart` does all steps of the quickstart at once)"
        )
    if folder.name == "quickstart-tiny":
        return f"`rayrl models create-tiny {folder}` makes it (`make quickstart` does all steps at once)"
    return (
        "make one with `rayrl models import SOURCE` (for example `rayrl models import smollm2-135m-instruct`) and give "
        "its path in model.path"
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part that describes the language model: models of several modalities nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and "vocab_size" not in config else config


def _has_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> bool:
    return bool(tokenizer_config.get("chat_template")) or (folder / "chat_template.jinja").is_file()


def _first_int(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)


def _required_int(config: Mapping[str, Any], names: tuple[str, ...], folder: Path) -> int:
    value = _first_int(config, names)
    if value is None:
        raise ModelError(f"{str(folder / 'config.json')!r} states no {names[0]}")
    return value


def _read_json(file: Path) -> dict[str, Any] | None:
    """Return the object in `file`, None if there is no such file; ModelError if it is not a JSON object."""
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(file)!r}: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{str(file)!r} must be a JSON object, got {type(data).__name__}")
    return data
