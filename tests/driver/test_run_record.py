"""What the ledger says of the end of a run, and the audit that is left."""

import asyncio
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import RUN_FAILED, RUN_INTERRUPTED
from rayrl.checkpoint.ledger_reader import EventRow, last_of_run, read_ledger
from rayrl.driver.progress import Progress
from rayrl.driver.run_record import recording_run


async def end_with(error: BaseException, root: Path) -> EventRow:
    stream: Any = SimpleNamespace(state=lambda: {"length": 9})
    with closing(Ledger.open(root / "ledger.sqlite")) as ledger:
        with pytest.raises(type(error)):
            async with recording_run(ledger, stream, Progress(step=4), root):
                raise error
    last = last_of_run(read_ledger(root / "ledger.sqlite").events)
    assert last is not None
    return last


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()])
async def test_run_that_is_left_at_once_is_recorded_as_interrupted(tmp_path: Path, error: BaseException) -> None:
    last = await end_with(error, tmp_path)

    assert (last.kind, last.step, last.detail) == (RUN_INTERRUPTED, 4, {})


@pytest.mark.asyncio
async def test_run_that_fails_is_recorded_with_its_error(tmp_path: Path) -> None:
    last = await end_with(OSError("gone"), tmp_path)

    assert (last.kind, last.detail) == (RUN_FAILED, {"error": "OSError: gone"})
