"""A record with named fields, as files hold them, to a prompt row."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rayrl.datasets.source import PromptRow
from rayrl.errors import DatasetError
from rayrl.types.prompt import Message
from rayrl.utils.nearest import did_you_mean


def row_from_record(record: Mapping[str, Any], prompt_field: str, answer_field: str | None, where: str) -> PromptRow:
    """Return the row that a record describes; fields other than prompt and answer become its metadata.

    Args:
        record: one JSON object or table row.
        prompt_field: holds the question, or a list of `{role, content}` messages.
        answer_field: holds the reference answer (text or number; null for none); None if the dataset has none.
        where: names the record in errors, for example `line 3 of 'sums.jsonl'`.

    Raises DatasetError if a field is missing or has another type.
    """
    for name, setting in ((prompt_field, "prompt_field"), (answer_field, "answer_field")):
        if name is not None:
            check_field(name, record.keys(), setting, where)
    prompt = record[prompt_field]
    messages = None if isinstance(prompt, str) else _read_messages(prompt, prompt_field, where)
    return PromptRow(
        text=prompt if messages is None else messages[-1].content,
        answer=None if answer_field is None else _read_answer(record[answer_field], answer_field, where),
        messages=messages,
        metadata={key: value for key, value in record.items() if key not in (prompt_field, answer_field)},
    )


def check_field(name: str, existing: Collection[str], setting: str, where: str) -> None:
    """Raise DatasetError if there is no field `name`; `setting` is the config field that asked for it."""
    if name in existing:
        return
    fix = " (or dataset.answer_field: null if there are no answers)" if setting == "answer_field" else ""
    raise DatasetError(
        f"{where} has no field {name!r}{did_you_mean(name, existing)}; it has {', '.join(map(repr, existing))}. "
        f"Change dataset.{setting}{fix}"
    )


def derive_name(source: str) -> str:
    """Return `source` with what a dataset name cannot hold replaced by `_`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", source).strip("_.") or "dataset"


def _read_answer(value: Any, name: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise DatasetError(f"field {name!r} of {where} must be text, a number or null, got {type(value).__name__}")


def _read_messages(value: Any, name: str, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or not value:
        raise DatasetError(
            f"field {name!r} of {where} must be text or a list of {{role, content}} messages, got {_describe(value)}"
        )
    messages: list[Message] = []
    for item in value:
        if not isinstance(item, Mapping) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
            raise DatasetError(f"field {name!r} of {where}: {item!r} is not a message with text `role` and `content`")
        messages.append(Message(role=item["role"], content=item["content"]))
    return tuple(messages)


def _describe(value: Any) -> str:
    return "an empty list" if isinstance(value, Sequence) and not value else type(value).__name__
