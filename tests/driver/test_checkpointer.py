"""When checkpoints are begun, put off and complete, and what their failure does; with fake workers and a real store."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from groups import buffered
from small_runs import small_config

from rayrl.checkpoint.disk import Disk
from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import CHECKPOINT_FAILED
from rayrl.checkpoint.retention import RetentionRule
from rayrl.checkpoint.store import CheckpointStore
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.driver.checkpointer import Checkpointer
from rayrl.driver.group_buffer import GroupBuffer
from rayrl.driver.progress import Progress
from rayrl.errors import ActorError, CheckpointError

pytestmark = pytest.mark.asyncio


class FakeTrain:
    """A training rank whose write ends when the test says so."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.is_written = asyncio.Event()
        self.is_written.set()
        self.error: Exception | None = None

    async def call_all(self, method: str, *args: Any, seconds: float, phase: str) -> list[Any]:
        if method == "load":
            return [None]
        if method == "begin_save":
            self.folders.append(Path(args[0]))
            self.folders[-1].mkdir()
            (self.folders[-1] / "state").write_bytes(b"weights")
            return [None]
        assert method == "save_ended"
        if self.error is not None:
            raise self.error
        return [self.is_written.is_set()]


class FakeWorkers:
    async def call_any(self, method: str, path: str, *batches: Any, seconds: float, phase: str) -> None:
        assert method == "write_groups"
        write_text(path, ",".join(batches))


def write_text(path: str, text: str) -> None:
    Path(path).write_text(text)


class FullDisk(Disk):
    """Has no space while `is_full`."""

    def __init__(self) -> None:
        self.is_full = False

    def write(self, path: Path, data: bytes) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write(path, data)


class Bench:
    def __init__(self, root: Path, algorithm: dict[str, Any] | None = None, **options: Any) -> None:
        config = small_config(
            model__path=str(root),
            driver={"groups_per_step": 1, "num_steps": 9},
            algorithm=algorithm or {},
            checkpoint={"every": 2, "keep_best": "eval/accuracy", **options},
        )
        self.root = root / "checkpoints"
        self.disk = FullDisk()
        self.store = CheckpointStore(self.root, disk=self.disk, rule=RetentionRule.of(config.checkpoint))
        self.train = FakeTrain()
        self.ledger = Ledger.open(root / "ledger.sqlite")
        self.progress = Progress()
        self.buffer = GroupBuffer()
        self.checkpointer = Checkpointer(
            config=config,
            store=self.store,
            run_id="r",
            config_digest="c",
            train=self.train,  # type: ignore[arg-type]
            workers=FakeWorkers(),  # type: ignore[arg-type]
            buffer=self.buffer,
            stream=PromptStream(load_source(config.dataset), seed=0, shuffle=False),
            progress=self.progress,
            ledger=self.ledger,
        )

    async def step(self, step: int) -> bool:
        """End a step as the train loop does; return whether a checkpoint was begun."""
        self.progress.step = self.progress.version = step
        await self.checkpointer.note_ended()
        if not self.checkpointer.is_due(step):
            return False
        await self.checkpointer.save()
        return True

    def complete(self) -> list[int]:
        return [item.step for item in self.store.complete()]


async def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_the_moment_of_its_copy(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.train.is_written.clear()
    bench.buffer.put(buffered(7))

    assert await bench.step(2)
    bench.buffer.remove([7])
    await bench.step(3)
    assert bench.complete() == []
    bench.train.is_written.set()
    await bench.checkpointer.finish_writing()

    (checkpoint,) = bench.store.complete()
    state = checkpoint.load_state()
    assert (state.step, state.version, state.buffered) == (2, 2, 1)
    assert (checkpoint.path / "groups.arrow").read_text() == "ref-7"


async def test_checkpoint_that_falls_due_while_one_is_written_is_put_off_to_the_next_step_after_it(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.train.is_written.clear()

    begun = [await bench.step(step) for step in (1, 2, 3, 4)]
    bench.train.is_written.set()
    await bench.checkpointer.finish_writing()
    begun += [await bench.step(step) for step in (5, 6)]
    await bench.checkpointer.save_now()

    assert begun == [False, True, False, False, True, False]
    assert len(bench.train.folders) == 3, "one copy at a time: of steps 2, 5 and 6"
    assert bench.complete() == [5, 6]


async def test_checkpoint_is_complete_before_training_goes_on_when_not_in_the_background(tmp_path: Path) -> None:
    bench = Bench(tmp_path, background=False)
    await bench.step(2)
    assert bench.complete() == [2]


async def test_full_disk_ends_the_run_with_the_cause_and_older_checkpoints_intact(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.step(2)
    await bench.checkpointer.finish_writing()
    bench.disk.is_full = True

    await bench.step(4)
    with pytest.raises(CheckpointError, match=r"No space left on device.*older checkpoints are intact"):
        await bench.checkpointer.save_now()

    assert bench.complete() == [2]
    assert not list(bench.root.glob(".tmp-*")), "the space is given back"


async def test_failure_of_a_save_shows_at_the_end_of_the_next_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.train.error = CheckpointError("cannot write: Input/output error")
    await bench.step(2)
    await asyncio.wait([bench.checkpointer._task])  # type: ignore[list-item]
    with pytest.raises(CheckpointError, match="Input/output error"):
        await bench.step(3)


async def test_full_disk_is_counted_and_recorded_when_the_run_is_to_continue(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="continue")
    bench.disk.is_full = True
    for step in (2, 3, 4):
        await bench.step(step)
        await bench.checkpointer.finish_writing()
    bench.disk.is_full = False
    await bench.step(6)
    await bench.checkpointer.finish_writing()

    assert bench.complete() == [6]
    assert bench.checkpointer.metrics()["checkpoint/failed"] == 2
    assert bench.checkpointer.metrics()["checkpoint/written"] == 1
    rows = bench.ledger._connection.execute("SELECT kind FROM events").fetchall()
    assert rows == [(CHECKPOINT_FAILED,)] * 2


async def test_worker_that_cannot_write_its_part_leaves_nothing_and_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.train.error = ActorError("train-0 died")
    await bench.step(2)
    with pytest.raises(ActorError, match="train-0 died"):
        await bench.checkpointer.finish_writing()
    assert list(bench.root.iterdir()) == []


async def test_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.train.is_written.clear()
    await bench.step(2)
    await bench.checkpointer.close()
    assert list(bench.root.iterdir()) == []


async def test_only_an_evaluation_of_exactly_one_version_decides_which_checkpoint_is_the_best(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep_last=1)
    for step, accuracy, strays in ((2, 0.9, 0.5), (4, 0.6, 0.0), (6, 0.3, 0.0), (8, 0.1, 0.0)):
        await bench.step(step)
        bench.checkpointer.note_evaluation(
            {"eval/accuracy": accuracy, "eval/version": float(step), "eval/other_version_share": strays}
        )
        await bench.checkpointer.finish_writing()
    assert bench.complete() == [4, 8]


async def test_resume_is_refused_when_the_model_folder_has_changed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.step(2)
    await bench.checkpointer.finish_writing()
    (tmp_path / "tokenizer.json").write_text("{}")
    latest = bench.store.latest()
    assert latest is not None
    with pytest.raises(CheckpointError, match=r"model folder .* is not what it was"):
        await Bench(tmp_path).checkpointer.restore(latest)


async def test_run_goes_on_when_a_copy_cannot_be_made_and_it_is_to_continue(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    bench = Bench(tmp_path, copy_to=str(tmp_path / "file" / "copies"), on_error="continue")
    await bench.step(2)
    await bench.checkpointer.finish_writing()
    assert bench.complete() == [2]
    assert bench.checkpointer.metrics()["checkpoint/failed"] == 1


async def test_copy_elsewhere_keeps_what_the_store_keeps(tmp_path: Path) -> None:
    bench = Bench(tmp_path, copy_to=str(tmp_path / "copies"), keep_last=1)
    for step in (2, 4):
        await bench.step(step)
        await bench.checkpointer.finish_writing()
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["step_000004"]


async def test_an_adapted_kl_coefficient_comes_back_with_its_checkpoint(tmp_path: Path) -> None:
    algorithm = {"kl": {"coef": 0.1, "adaptive": {"target": 0.02, "horizon": 100}}}
    bench = Bench(tmp_path, algorithm)
    bench.progress.kl_coef = 0.37
    await bench.step(2)
    await bench.checkpointer.finish_writing()
    latest = bench.store.latest()
    assert latest is not None
    resumed = Bench(tmp_path, algorithm)

    await resumed.checkpointer.restore(latest)

    assert resumed.progress.kl_coef == 0.37
