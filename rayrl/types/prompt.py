"""A prompt: one item of a dataset, with a stable identity."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PromptId:
    """Names one prompt of one pass over a dataset; equal ids are the same problem in the same epoch.

    Example: `PromptId(dataset="chain_sum", epoch=0, ordinal=17)`, printed as `chain_sum/0/17`.
    """

    dataset: str
    """Name of the dataset, no slash."""
    epoch: int
    """0 for the first pass."""
    ordinal: int
    """Position in the shuffled order of that epoch, 0-based; not the row number."""

    def __str__(self) -> str:
        return f"{self.dataset}/{self.epoch}/{self.ordinal}"

    @classmethod
    def parse(cls, text: str) -> "PromptId":
        """Return the id that prints as `text`; ValueError if it is not one."""
        dataset, epoch, ordinal = text.rsplit("/", 2)
        return cls(dataset=dataset, epoch=int(epoch), ordinal=int(ordinal))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message, as chat templates take it."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem: what the model is asked and what its verifier needs.

    Example: `Prompt(id=PromptId(dataset="sums", epoch=0, ordinal=3), text="3+4=", answer="7")`.
    """

    id: PromptId
    text: str
    """The question; a workflow wraps it in the chat template, or uses it as it stands."""
    answer: str | None = None
    """The reference answer, if the dataset has one. SFT trains on it as the completion."""
    messages: tuple[Message, ...] | None = None
    """A whole conversation to start from, instead of `text` as one user message."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the dataset row for the reward; JSON-able values only."""
