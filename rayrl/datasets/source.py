"""What a dataset is to the rest of the code: numbered rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayrl.types.prompt import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One row of a dataset; with an id it is a `Prompt`, whose fields these are.

    Example: `PromptRow(text="3+4=", answer="7")`
    """

    text: str
    answer: str | None = None
    messages: tuple[Message, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class PromptSource(Protocol):
    """A dataset with a fixed number of rows; the same config gives the same rows in every process."""

    @property
    def name(self) -> str:
        """Name in prompt ids and metrics; no slash."""
        ...

    def __len__(self) -> int:
        """Number of rows, at least 1."""
        ...

    def row(self, index: int) -> PromptRow:
        """Return row `index`, 0 <= index < len. Raises DatasetError if this row is malformed."""
        ...
