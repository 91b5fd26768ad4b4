"""A save that is written beside training: it holds the moment of its copy, one at a time, and its failure is told."""

import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import run_on_ranks
from samples import make_engine, random_batch, training_config, weights

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.errors import CheckpointError
from rayrl.training.background_save import BackgroundSave
from rayrl.training.losses import PolicyLoss


def _save_beside_a_step(rank: int, world_size: int, model: str, folder: str) -> dict[str, Any]:
    """Copy, train two steps while the copy is written in a thread, and read it back."""
    engine = make_engine(Path(model), training_config(data=world_size), rank=rank, world_size=world_size)
    batch, loss_fn = random_batch(), PolicyLoss(AlgorithmConfig(), 16)
    engine.train_step(batch, loss_fn)
    expected = {name: tensor.clone() for name, tensor in weights(engine).items()}
    saving = BackgroundSave()
    saving.start(engine.begin_save(Path(folder)))
    for _ in range(2):
        engine.train_step(batch, loss_fn)
    while not saving.poll(wait_s=1.0):
        pass
    moved = any(not tensor.equal(expected[name]) for name, tensor in weights(engine).items())
    engine.load(Path(folder))
    return {"expected": expected, "actual": weights(engine), "moved": moved, "steps": engine.status().optimizer_steps}


def _assert_is_the_moment_of_the_copy(result: dict[str, Any]) -> None:
    assert result["moved"], "training went on"
    assert result["steps"] == 1
    for name, tensor in result["expected"].items():
        assert result["actual"][name].equal(tensor), name


def test_saved_state_is_that_of_the_copy_when_training_goes_on(llama_folder: Path, tmp_path: Path) -> None:
    _assert_is_the_moment_of_the_copy(_save_beside_a_step(0, 1, str(llama_folder), str(tmp_path / "state")))


@pytest.mark.distributed
def test_saved_state_of_two_ranks_is_that_of_the_copy_when_training_goes_on(llama_folder: Path, tmp_path: Path) -> None:
    for result in run_on_ranks(_save_beside_a_step, 2, tmp_path, str(llama_folder), str(tmp_path / "state")):
        _assert_is_the_moment_of_the_copy(result)


@pytest.mark.parametrize("is_full", [True, False])
def test_save_that_cannot_be_written_says_what_is_free_when_that_is_too_little(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    write = make_engine(llama_folder, training_config()).begin_save(tmp_path / "state")
    free = 100_000 if is_full else 1 << 60
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)

    with largest_file(4096), pytest.raises(CheckpointError, match="cannot write the training state to") as caught:
        write()

    assert ("the disk may be full: 0.1 MB are free, the state has" in str(caught.value)) == is_full


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let writes beyond this size fail, as on a disk that has no more room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_second_save_is_refused_while_the_first_is_written() -> None:
    saving, release = BackgroundSave(), threading.Event()
    saving.start(lambda: _wait(release))
    try:
        assert not saving.poll()
        with pytest.raises(CheckpointError, match=r"still being written.*checkpoint\.every"):
            saving.start(lambda: None)
    finally:
        release.set()
    assert saving.poll(wait_s=60)


def _wait(release: threading.Event) -> None:
    release.wait()


def test_failure_of_a_write_is_raised_once_with_its_cause(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    saving = BackgroundSave()
    saving.start(make_engine(llama_folder).begin_save(tmp_path / "file" / "state"))

    with pytest.raises(CheckpointError, match=r"cannot write the training state.*Not a directory"):
        saving.poll(wait_s=60)

    assert saving.poll(), "told once"
