"""The tokenizer of a model folder, as workflows see it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayrl.errors import ModelError
from rayrl.types.prompt import Message


class HfTokenizer:
    """Implements `rayrl.types.protocols.Tokenizer` on a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...], path: str) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._path = path

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a completion: those of the generation config, then the tokenizer's own."""
        return self._eos_token_ids

    @property
    def pad_token_id(self) -> int:
        """The padding token, or an end token where the tokenizer has none; padding is masked in any case."""
        pad: int | None = self._tokenizer.pad_token_id
        if pad is not None:
            return pad
        return self._eos_token_ids[0] if self._eos_token_ids else 0

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer can produce, special and added tokens included."""
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens.

        Raises ModelError if the vocabulary cannot express `text`, which only tokenizers of very small models do.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise ModelError(f"the tokenizer of {self._path!r} cannot encode {text!r}: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, without special tokens and without any clean-up of spaces."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation with the opening of the assistant's turn.

        Raises ModelError if the model has no chat template, or if its template refuses the conversation.
        """
        if not self.has_chat_template:
            raise ModelError(
                f"model {self._path!r} has no chat template; set rollout.workflow.prompt_format: text to use prompts "
                "as they stand, or choose an instruction-tuned model in model.path"
            )
        from jinja2.exceptions import TemplateError

        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            roles = [message.role for message in messages]
            raise ModelError(f"the chat template of {self._path!r} refuses the roles {roles}: {error}") from error
        # The template writes its special tokens itself, so none are added.
        return self.encode(text)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> HfTokenizer:
    """Return the tokenizer of the model folder at `path`. Raises ModelError if it cannot be loaded."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"model folder {str(folder)!r} does not exist; make one with `rayrl models import SOURCE` and give its "
            "path in model.path"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load the tokenizer of {str(folder)!r}: {error}") from error
    return HfTokenizer(tokenizer, _eos_token_ids(tokenizer, folder), str(folder))


def _eos_token_ids(tokenizer: Any, folder: Path) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if value is not None:
            ids += value if isinstance(value, list) else [value]
            break
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))
