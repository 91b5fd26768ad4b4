"""From which checkpoint a resume goes on: the newest whole one, and never from step 0 in silence."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayrl.audit.identity import read_identity
from rayrl.audit.run_record import RunRecord, read_run
from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.manifest import read_manifest
from rayrl.checkpoint.mirror import CheckpointMirror
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import CheckpointStore
from rayrl.config.digest import digest_of
from rayrl.config.run import RunConfig
from rayrl.driver.assembly import resolved_yaml
from rayrl.driver.resume import ResumePoint, find_checkpoint, set_damaged_aside
from rayrl.errors import CheckpointError
from rayrl.tracking.run_folder import RunFolder

GROUPS = "groups.arrow"


@pytest.fixture
def config(repo_root: Path, tmp_path: Path) -> RunConfig:
    return RunConfig.load(repo_root / "configs" / "quickstart_grpo.yaml", [f"run.output_root={tmp_path}"])


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(level=logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rayrl")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def leave_run(config: RunConfig, *checkpoints: int, steps: int = 8, run_id: str | None = None) -> RunFolder:
    """Leave the folder of a run with these steps, and open it for a resume."""
    text = resolved_yaml(config)
    folder = RunFolder.create(config.run_dir, text, digest_of(text), ["rayrl"], resume=False)
    store = CheckpointStore(folder.checkpoints, keep_last=9)
    ledger = Ledger.open(folder.ledger_path)
    for step in range(1, steps + 1):
        ledger.record_step(step, step, [])
        if step in checkpoints:
            pending = store.begin(step)
            (pending.path / GROUPS).write_bytes(bytes(200))
            state = RunState(
                step=step,
                version=step,
                dataset_state={},
                buffered=0,
                ledger_position=ledger.position,
                consumed=0,
                config_digest="c",
                run_id=run_id or folder.run_id,
                extra={"ledger_head": ledger.head},
            )
            store.commit(pending, state)
    ledger.close()
    folder.close()
    return RunFolder.create(config.run_dir, text, digest_of(text), ["rayrl"], resume=True)


def cut_off(folder: RunFolder, step: int) -> Path:
    path = folder.checkpoints / f"step_{step:06d}"
    (path / GROUPS).write_bytes(bytes(100))
    return path


def flip_a_byte(folder: RunFolder, step: int) -> Path:
    path = folder.checkpoints / f"step_{step:06d}"
    (path / GROUPS).write_bytes(bytes(199) + b"x")
    return path


def write_ledger_anew(folder: RunFolder, num_steps: int) -> None:
    folder.ledger_path.unlink()
    ledger = Ledger.open(folder.ledger_path)
    for step in range(1, num_steps + 1):
        ledger.record_step(step, step, [])
    ledger.close()


def record_of(folder: RunFolder, config: RunConfig) -> RunRecord:
    return read_run(folder.path, read_identity(folder.path), config)


def step_of(point: ResumePoint) -> int | None:
    return None if point.checkpoint is None else point.checkpoint.step


def content(folder: RunFolder) -> dict[str, bytes]:
    files = (path for path in folder.path.rglob("*") if path.is_file() and path.name != "run.lock")
    return {path.relative_to(folder.path).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("damage", [cut_off, flip_a_byte])
def test_resume_is_refused_and_changes_nothing_when_no_checkpoint_is_whole(config: RunConfig, damage: object) -> None:
    folder = leave_run(config, 4, 8)
    cut_off(folder, 4)
    assert callable(damage)
    damage(folder, 8)
    before = content(folder)

    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(folder, config, "auto")

    said = str(caught.value)
    assert "step_000004 is damaged: groups.arrow has 100 bytes, not 200" in said
    assert "step_000008 is damaged: " in said and "remove this checkpoint" not in said
    assert "from a copy" in said and "run.name" in said and "step 0, remove the folders" in said
    assert content(folder) == before


@pytest.mark.parametrize("damage", [cut_off, flip_a_byte])
def test_older_checkpoint_is_taken_and_the_steps_done_again_are_told_when_the_newest_is_damaged(
    config: RunConfig, warnings: list[str], damage: object
) -> None:
    folder = leave_run(config, 2, 4, 8, steps=9)
    assert callable(damage)
    damage(folder, 8)

    point = find_checkpoint(folder, config, "auto")

    assert step_of(point) == 4
    assert len(warnings) == 1
    assert "step_000008 is damaged" in warnings[0]
    assert "going on from step 4 instead, so 5 steps (5 to 9) are done again" in warnings[0]
    assert (folder.checkpoints / "step_000008").is_dir(), "nothing is changed before the resume is accepted"


def test_damaged_checkpoint_is_kept_aside_and_in_the_way_of_nothing_when_the_run_goes_on(config: RunConfig) -> None:
    folder = leave_run(config, 4, 8)
    damaged = cut_off(folder, 8)
    assert "checkpoints/step_000008" in record_of(folder, config).unreadable

    set_damaged_aside(folder, find_checkpoint(folder, config, "auto"))

    aside = folder.checkpoints / "step_000008.damaged"
    assert not damaged.exists() and (aside / GROUPS).stat().st_size == 100
    assert "groups.arrow has 100 bytes" in (aside / "why_damaged.txt").read_text(encoding="utf-8")
    record = record_of(folder, config)
    assert (list(record.checkpoints), dict(record.unreadable)) == (["step_000004"], {})
    again = find_checkpoint(folder, config, "auto")
    assert (step_of(again), again.damaged) == (4, ())


def test_earlier_damaged_folder_is_kept_when_the_same_step_is_damaged_again(config: RunConfig) -> None:
    folder = leave_run(config, 4, 8)
    (folder.checkpoints / "step_000008.damaged").mkdir()
    cut_off(folder, 8)

    set_damaged_aside(folder, find_checkpoint(folder, config, "auto"))

    names = sorted(path.name for path in folder.checkpoints.iterdir())
    assert names == ["step_000004", "step_000008.damaged", "step_000008.damaged.1"]


def test_damaged_checkpoint_beside_a_chosen_one_is_set_aside_without_a_word_about_steps(
    config: RunConfig, warnings: list[str]
) -> None:
    folder = leave_run(config, 4, 8)
    cut_off(folder, 8)

    point = find_checkpoint(folder, config, folder.checkpoints / "step_000004")

    assert (step_of(point), [item.step for item in point.damaged], warnings) == (4, [8], [])


def test_whole_copy_is_fetched_when_the_newest_checkpoint_is_damaged(
    config: RunConfig, tmp_path: Path, warnings: list[str]
) -> None:
    copies = tmp_path / "copies"
    checkpoint = config.checkpoint.model_copy(update={"copy_to": str(copies)})
    config = config.model_copy(update={"checkpoint": checkpoint})
    folder = leave_run(config, 4, 8)
    newest = folder.checkpoints / "step_000008"
    CheckpointMirror(str(copies)).upload(newest, read_manifest(newest))
    cut_off(folder, 8)

    point = find_checkpoint(folder, config, "auto")

    assert point.checkpoint is not None
    assert (point.checkpoint.step, point.checkpoint.path.name, warnings) == (8, "step_000008.1", [])
    assert [item.path.name for item in point.damaged] == ["step_000008"]


def test_checkpoint_that_cannot_be_read_is_neither_passed_over_nor_set_aside(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = leave_run(config, 4, 8)
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.parent.name == "step_000008":
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)

    with pytest.raises(CheckpointError, match=r"step_000008.*Input/output error; it may be whole"):
        find_checkpoint(folder, config, "auto")


def test_run_begins_at_step_0_when_the_damaged_folders_were_removed(config: RunConfig, warnings: list[str]) -> None:
    folder = leave_run(config)

    assert find_checkpoint(folder, config, "auto").checkpoint is None
    assert len(warnings) == 1 and "starting at step 0" in warnings[0]


@pytest.mark.parametrize(
    ("size", "said"), [(9000, "malformed"), (0, "is empty"), (None, "is missing"), (10, "cannot be used")]
)
def test_resume_is_refused_with_what_to_do_when_the_ledger_is_damaged(
    config: RunConfig, size: int | None, said: str
) -> None:
    folder = leave_run(config, 4, 8)
    path = folder.ledger_path
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(CheckpointError, match=rf"{said}.*; put ledger\.sqlite back from a copy.*another run\.name"):
        find_checkpoint(folder, config, "auto")


def test_resume_is_refused_when_the_ledger_is_an_older_copy(config: RunConfig) -> None:
    folder = leave_run(config, 4, 8)
    write_ledger_anew(folder, 1)

    with pytest.raises(CheckpointError, match=r"position 1, the checkpoint of step 8 at position 8.*put ledger"):
        find_checkpoint(folder, config, "auto")


def test_resume_is_refused_when_the_ledger_is_of_another_run(config: RunConfig) -> None:
    folder = leave_run(config, 4, 8)
    write_ledger_anew(folder, 11)

    with pytest.raises(CheckpointError, match="has another history up to position 8 than the checkpoint of step 8"):
        find_checkpoint(folder, config, "auto")


def test_damaged_ledger_is_found_when_a_run_without_a_checkpoint_goes_on(config: RunConfig) -> None:
    folder = leave_run(config)
    folder.ledger_path.write_bytes(folder.ledger_path.read_bytes()[:9000])

    with pytest.raises(CheckpointError, match="malformed; put"):
        find_checkpoint(folder, config, "auto")
