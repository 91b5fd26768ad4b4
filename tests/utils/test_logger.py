"""Where log lines go."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger

import pytest

from rayrl.utils.logger import get_logger, setup_logging


@contextmanager
def no_handlers() -> Iterator[None]:
    """No handler of the project for the time of the body; pytest may add its own between setup and call."""
    root = getLogger("rayrl")
    before, level, propagate = root.handlers[:], root.level, root.propagate
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:], root.propagate = before, propagate
        root.setLevel(level)


def test_lines_go_to_the_present_stderr_when_the_one_before_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    with no_handlers():
        monkeypatch.setattr(sys, "stderr", first)
        setup_logging()
        first.close()
        monkeypatch.setattr(sys, "stderr", second)

        setup_logging()
        get_logger("train", rank=0).info("ready")

    assert second.getvalue().endswith("I [train:0] ready\n")
    assert second.getvalue().count("\n") == 1
