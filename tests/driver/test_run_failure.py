"""What a failed run leaves in its folder."""

import asyncio
from pathlib import Path

import pytest

from rayrl.driver.run_failure import keeping_failure, marking_start
from rayrl.errors import ActorError, CheckpointError, ConfigError, PlacementError, RayrlError
from rayrl.tracking.run_folder import RunFolder


def new_folder(root: Path, *, resume: bool = False) -> RunFolder:
    return RunFolder.create(root / "small", "a: 1\n", "d", ["rayrl"], resume=resume)


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, PlacementError])
def test_new_folder_is_gone_when_bad_input_shows_before_the_run_begins(tmp_path: Path, kind: type[RayrlError]) -> None:
    folder = new_folder(tmp_path)
    with pytest.raises(kind), folder, keeping_failure(folder):
        raise kind("bad")
    assert not folder.path.exists()


def test_folder_of_an_earlier_run_is_left_as_it_is_when_a_resume_is_refused(tmp_path: Path) -> None:
    new_folder(tmp_path).close()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "small").rglob("*") if path.name != "run.lock"}
    folder = new_folder(tmp_path, resume=True)
    with pytest.raises(CheckpointError), folder, keeping_failure(folder):
        raise CheckpointError("foreign")
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "small").rglob("*") if path.name != "run.lock"}
    assert after == before


def test_new_folder_is_gone_when_a_signal_comes_while_the_run_starts(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    with pytest.raises(asyncio.CancelledError), folder, keeping_failure(folder):
        raise asyncio.CancelledError
    assert not folder.path.exists()


def test_folder_stays_when_a_second_signal_ends_a_run_that_had_begun(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.ledger_path.touch()
    with pytest.raises(asyncio.CancelledError), folder, keeping_failure(folder):
        raise asyncio.CancelledError
    assert folder.path.exists()


def test_failure_is_kept_and_marked_when_the_run_had_begun(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    with pytest.raises(CheckpointError) as caught, folder, keeping_failure(folder), marking_start():
        raise CheckpointError("no space left")
    assert caught.value.after_start
    assert "no space left" in (folder.logs / "failure.txt").read_text(encoding="utf-8")


def test_failure_is_kept_when_something_else_than_the_input_was_wrong(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    with pytest.raises(ActorError), folder, keeping_failure(folder):
        raise ActorError("died")
    assert "ActorError: died" in (folder.logs / "failure.txt").read_text(encoding="utf-8")


def test_failure_itself_is_raised_when_it_cannot_be_written(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.logs.rmdir()
    with pytest.raises(ActorError, match="died"), folder, keeping_failure(folder):
        raise ActorError("died")
