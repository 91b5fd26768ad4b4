"""The rollout log beside training: a write that fails switches it off, and the ledger says why files are missing."""

from pathlib import Path
from typing import Any

import pytest

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import ROLLOUT_LOG_LOST
from rayrl.checkpoint.ledger_reader import read_ledger
from rayrl.driver.rollout_log import RolloutLog
from rayrl.errors import ActorError


class Workers:
    """Rollout workers that write what they are given, but for one step."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at
        self.written: list[str] = []

    async def call_any(self, method: str, path: str, *batches: Any, seconds: float, phase: str) -> None:
        if self.fails_at in path:
            raise ActorError("rollout-0 failed:\n  OSError: No space left on device")
        self.written.append(Path(path).name)


@pytest.mark.asyncio
async def test_failed_write_is_an_event_and_nothing_is_written_from_there_on(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    workers: Any = Workers("step_000002")
    log = RolloutLog(folder=tmp_path, workers=workers, is_enabled=True, deadline_s=60.0, ledger=ledger)

    for step in (1, 2, 3, 4):
        await log.write(step, [])
    await log.finish()

    ledger.close()
    assert workers.written == ["step_000001.parquet"]
    (event,) = read_ledger(tmp_path / "ledger.sqlite").events
    assert (event.kind, event.step, event.detail) == (
        ROLLOUT_LOG_LOST,
        2,
        {"error": "rollout-0 failed: OSError: No space left on device"},
    )


@pytest.mark.asyncio
async def test_write_under_way_ends_before_the_log_is_closed(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    workers: Any = Workers("none")
    log = RolloutLog(folder=tmp_path, workers=workers, is_enabled=True, deadline_s=60.0, ledger=ledger)
    await log.write(1, [])
    await log.close()
    ledger.close()
    assert workers.written == ["step_000001.parquet"]
