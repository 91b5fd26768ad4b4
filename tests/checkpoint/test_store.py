"""The checkpoint store: what is found, what is refused, what is kept."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from rayrl.checkpoint.manifest import MANIFEST, STATE
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import CheckpointStore
from rayrl.errors import CheckpointError


def state(step: int, run_id: str = "run-a") -> RunState:
    return RunState(
        step=step,
        version=step + 1,
        dataset_state={"epoch": 0, "frontier": step * 16},
        buffered=1,
        ledger_position=step,
        consumed=step * 16,
        config_digest="c",
        run_id=run_id,
        extra={"coefficient": 0.5},
    )


def save(store: CheckpointStore, step: int, run_id: str = "run-a") -> Path:
    pending = store.begin(step)
    (pending.path / "model").mkdir()
    (pending.path / "model" / "rank_0.bin").write_bytes(bytes([step]) * 1000)
    return store.commit(pending, state(step, run_id))


def names(root: Path) -> list[str]:
    return sorted(item.name for item in root.iterdir())


def test_committed_checkpoint_is_found_and_holds_state_and_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)

    path = save(store, 10)
    latest = store.latest()

    assert latest is not None
    assert (path.name, latest.path, latest.step, latest.version) == ("step_000010", path, 10, 11)
    assert store.open(path, run_id="run-a").load_state() == state(10)
    assert (path / "model" / "rank_0.bin").read_bytes() == b"\x0a" * 1000
    assert sorted(latest.manifest.files) == ["model/rank_0.bin", STATE]


def test_looking_for_a_checkpoint_creates_and_removes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    store = CheckpointStore(root, keep_last=1)

    assert store.latest() is None
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        store.open(root / "step_000001")
    assert not root.exists()

    root.mkdir()
    (root / ".tmp-step_000001-abcd").mkdir()
    assert CheckpointStore(root, keep_last=1).latest() is None
    assert names(root) == [".tmp-step_000001-abcd"], "a reader leaves the writer's folder alone"


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)

    for step in (5, 10, 15, 20):
        save(store, step)

    assert names(tmp_path) == ["step_000015", "step_000020"]


def test_latest_is_the_one_committed_last_when_the_run_went_back_to_an_older_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (5, 10):
        save(store, step)

    save(store, 6)
    latest = CheckpointStore(tmp_path, keep_last=2).latest()

    assert latest is not None and latest.step == 6
    assert names(tmp_path) == ["step_000006", "step_000010"]


def test_step_saved_twice_never_replaces_in_place(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)

    first, second = save(store, 10), save(store, 10)
    latest = store.latest()

    assert (first.name, second.name) == ("step_000010", "step_000010.1")
    assert latest is not None and latest.path == second
    assert names(tmp_path) == ["step_000010.1"]


def test_folders_of_dead_runs_are_removed_when_the_next_one_writes(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step_000007-dead").mkdir()
    (tmp_path / "notes").mkdir()
    store = CheckpointStore(tmp_path, keep_last=1)

    first = store.begin(8)
    second = store.begin(8)

    assert names(tmp_path) == sorted([first.path.name, second.path.name, "notes"])


def test_file_that_no_worker_wrote_here_is_an_error_and_nothing_becomes_visible(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    pending = store.begin(1)

    with pytest.raises(CheckpointError, match=r"lacks \['model/rank_3.bin'\].*run\.output_root must be on a file sys"):
        store.commit(pending, state(1), expected=["model/rank_3.bin"])

    assert names(tmp_path) == []


def test_root_below_a_file_names_path_and_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match=r"file/checkpoints/.tmp-step_000001-\w+: Not a directory"):
        CheckpointStore(tmp_path / "file" / "checkpoints", keep_last=1).begin(1)


def rewrite_manifest(path: Path, **changes: object) -> None:
    data = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**data, **changes}))


def cut_short(path: Path) -> None:
    file = path / "model" / "rank_0.bin"
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_byte(path: Path) -> None:
    (path / "model" / "rank_0.bin").write_bytes(b"\x0b" + b"\x0a" * 999)


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("no manifest", lambda path: (path / MANIFEST).unlink(), r"incomplete: it has no manifest\.json"),
    ("half a manifest", lambda path: (path / MANIFEST).write_text('{"kind": "ra'), r"damaged: manifest\.json is not J"),
    ("other step in the manifest", lambda path: rewrite_manifest(path, step=11), "does not match its own digest"),
    ("manifest of another tool", lambda path: (path / MANIFEST).write_text("[1]"), "not a rayrl checkpoint"),
    ("file missing", lambda path: (path / "model" / "rank_0.bin").unlink(), "incomplete: model/rank_0.bin is missing"),
    ("file cut short", cut_short, "damaged: model/rank_0.bin has 999 bytes, not 1000"),
    ("state cut short", lambda path: (path / STATE).write_text("{}"), r"damaged: state\.json has 2 bytes"),
]


@pytest.mark.parametrize(("damage", "message"), [item[1:] for item in DAMAGES], ids=[item[0] for item in DAMAGES])
def test_damaged_checkpoint_is_passed_over_by_latest_and_refused_by_open(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 5)
    path = save(store, 10)

    damage(path)
    latest = store.latest()

    assert latest is not None and latest.step == 5
    with pytest.raises(CheckpointError, match=message) as caught:
        store.open(path)
    assert str(path) in str(caught.value)


def test_changed_byte_is_found_by_digest_and_the_message_says_how_to_go_on(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    path = save(store, 10)

    flip_a_byte(path)

    with pytest.raises(CheckpointError, match=r"digest of model/rank_0\.bin is .*, not .*remove this checkpoint"):
        store.open(path)


def test_passing_over_is_logged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    (tmp_path / "step_000001").mkdir()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rayrl.checkpoint")
    logger.addHandler(handler)
    try:
        assert store.latest() is None
        assert store.latest() is None, "and not told again at each save"
    finally:
        logger.removeHandler(handler)

    assert len(lines) == 1 and "passed over" in lines[0] and "step_000001" in lines[0]


def test_checkpoint_of_a_later_format_is_never_passed_over_for_an_older_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 5)
    rewrite_manifest(save(store, 10), format=99)

    for look in (store.latest, lambda: store.open(tmp_path / "step_000010")):
        with pytest.raises(CheckpointError, match="has format 99, this rayrl reads up to 1; upgrade"):
            look()


def test_folder_of_something_else_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")

    with pytest.raises(CheckpointError, match=r"is not a rayrl checkpoint: it has no manifest\.json"):
        CheckpointStore(tmp_path, keep_last=1).open(tmp_path)


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    path = save(store, 10, run_id="run-b")

    with pytest.raises(CheckpointError, match="belongs to run run-b, this folder is of run run-a"):
        store.open(path, run_id="run-a")


def test_checkpoint_can_be_moved(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path / "a", keep_last=1), 10)

    moved = path.rename(tmp_path / "elsewhere")

    assert CheckpointStore(tmp_path / "b", keep_last=1).open(moved).load_state() == state(10)
