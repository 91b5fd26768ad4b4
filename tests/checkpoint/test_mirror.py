"""Copies of checkpoints on a file system of fsspec: complete or not there, whatever call they are cut off at."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rayrl.checkpoint.manifest import MANIFEST, STATE, read_manifest
from rayrl.checkpoint.mirror import CheckpointMirror
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import CheckpointStore
from rayrl.errors import CheckpointError

CHANGES = ("makedirs", "put_file", "pipe_file", "rm_file", "rm")


class CutOff(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def url() -> str:
    """A folder of its own in the file system that lives in this process."""
    return f"memory://{uuid.uuid4().hex}"


def save(store: CheckpointStore, step: int) -> Path:
    pending = store.begin(step)
    (pending.path / "train").mkdir()
    for rank in (0, 1):
        (pending.path / "train" / f"rank_{rank}").write_bytes(bytes([step]) * 100)
    return store.commit(
        pending,
        RunState(
            step=step,
            version=step,
            dataset_state={},
            buffered=0,
            ledger_position=step,
            consumed=0,
            config_digest="c",
            run_id="r",
        ),
    )


def calls_changed(mirror: CheckpointMirror, monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Call `act` with the name before each call that changes the file system."""
    fs = mirror._fs
    for name in CHANGES:

        def changed(*args: Any, name: str = name, original: Any = getattr(fs, name), **options: Any) -> Any:
            act(name)
            return original(*args, **options)

        monkeypatch.setattr(fs, name, changed)


def test_copy_comes_back_with_every_byte_and_is_found_by_the_store(tmp_path: Path, url: str) -> None:
    path = save(CheckpointStore(tmp_path / "a"), 3)
    mirror = CheckpointMirror(url)
    assert mirror.upload(path, read_manifest(path)) == f"{url}/step_000003"

    store = CheckpointStore(tmp_path / "b")
    store.adopt("step_000003", lambda folder: mirror.fetch("step_000003", folder))

    latest = store.latest()
    assert latest is not None
    assert store.open(latest.path, run_id="r").load_state().step == 3
    assert (latest.path / "train" / "rank_1").read_bytes() == b"\x03" * 100


def test_copy_cut_off_at_any_call_does_not_exist_and_the_one_before_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=9)
    first, second = save(store, 1), save(store, 2)
    counted: list[str] = []
    with monkeypatch.context() as patch:
        mirror = CheckpointMirror(f"memory://{uuid.uuid4().hex}")
        calls_changed(mirror, patch, counted.append)
        mirror.upload(second, read_manifest(second))
    assert counted[-1] == "pipe_file", "the manifest comes last"

    for cut_at in range(len(counted)):
        mirror = CheckpointMirror(f"memory://{uuid.uuid4().hex}")
        mirror.upload(first, read_manifest(first))
        made: list[str] = []

        def cut(name: str, made: list[str] = made, cut_at: int = cut_at) -> None:
            if len(made) == cut_at:
                raise CutOff
            made.append(name)

        with monkeypatch.context() as patch:
            calls_changed(mirror, patch, cut)
            with pytest.raises(CutOff):
                mirror.upload(second, read_manifest(second))
        assert list(mirror.complete()) == ["step_000001"], f"cut off at {counted[cut_at]}"
        mirror.upload(second, read_manifest(second))
        assert list(mirror.complete()) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("name", [STATE, "train/rank_0", MANIFEST])
def test_copy_that_lost_bytes_is_passed_over(tmp_path: Path, url: str, name: str) -> None:
    path = save(CheckpointStore(tmp_path), 1)
    mirror = CheckpointMirror(url)
    mirror.upload(path, read_manifest(path))
    file = f"{mirror._root}/step_000001/{name}"
    mirror._fs.pipe_file(file, mirror._fs.cat_file(file)[:-2])

    assert mirror.complete() == {}
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        mirror.fetch("step_000001", tmp_path / "back")


def test_copy_with_other_bytes_is_refused_and_leaves_nothing(tmp_path: Path, url: str) -> None:
    path = save(CheckpointStore(tmp_path / "a"), 1)
    mirror = CheckpointMirror(url)
    mirror.upload(path, read_manifest(path))
    mirror._fs.pipe_file(f"{mirror._root}/step_000001/train/rank_0", b"\x07" * 100)
    store = CheckpointStore(tmp_path / "b")

    with pytest.raises(CheckpointError, match=r"digest of train/rank_0"):
        store.adopt("step_000001", lambda folder: mirror.fetch("step_000001", folder))

    assert list((tmp_path / "b").iterdir()) == []


def test_file_system_that_goes_away_is_an_error_with_the_url_and_the_local_checkpoint_stays(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    mirror = CheckpointMirror(url)

    def gone(name: str) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    calls_changed(mirror, monkeypatch, gone)
    with pytest.raises(CheckpointError, match=rf"{url}/step_000001.*not connected.*run's folder are intact"):
        mirror.upload(path, read_manifest(path))
    latest = store.latest()
    assert latest is not None
    assert store.open(latest.path).step == 1


def test_old_copies_are_removed_and_foreign_folders_are_not(tmp_path: Path, url: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=9)
    mirror = CheckpointMirror(url)
    for step in (1, 2):
        path = save(store, step)
        mirror.upload(path, read_manifest(path))
    mirror._fs.pipe_file(f"{mirror._root}/thesis/chapter.txt", b"mine")

    mirror.keep_only(["step_000002"])

    assert list(mirror.complete()) == ["step_000002"]
    assert mirror._fs.exists(f"{mirror._root}/thesis/chapter.txt")


def test_unknown_protocol_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.copy_to='nope://x'"):
        CheckpointMirror("nope://x")


def test_local_folder_is_a_mirror_too(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path / "a"), 1)
    mirror = CheckpointMirror(str(tmp_path / "b"))
    mirror.upload(path, read_manifest(path))
    assert list(mirror.complete()) == ["step_000001"]
    assert isinstance(mirror._fs, fsspec.AbstractFileSystem)
