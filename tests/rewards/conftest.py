"""A prompt with an answer, for all rewards."""

from collections.abc import Callable
from typing import Any

import pytest

from rayrl.types.prompt import Prompt, PromptId


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(answer: str | None = "42", **fields: Any) -> Prompt:
        return Prompt(id=PromptId(dataset="sums", epoch=0, ordinal=9), text="question", answer=answer, **fields)

    return make
