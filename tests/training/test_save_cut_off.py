"""A whole save, training state, groups and commit, in a process that is killed at any operation on files.

Processes are really killed, by SIGKILL, at every open, mkdir, rename, remove and fsync below the checkpoints' folder,
whoever makes it: torch, Arrow's Python side or the store. What was not flushed by then is lost with the process.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from samples import make_engine, random_batch, random_groups

from rayrl.checkpoint.run_state import RunState, read_groups, write_groups
from rayrl.checkpoint.store import CheckpointStore
from rayrl.training.losses import SupervisedLoss

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def save(engine: Any, root: Path, step: int) -> None:
    """Do what ranks, rollout worker and driver do."""
    store = CheckpointStore(root, keep_last=1)
    pending = store.begin(step)
    write = engine.begin_save(pending.path / "train")
    engine.train_step(random_batch(), SupervisedLoss())
    write()
    write_groups(pending.path / "groups.arrow", random_groups(2))
    state = RunState(
        step=step,
        version=step,
        dataset_state={},
        buffered=2,
        ledger_position=step,
        consumed=0,
        config_digest="c",
        run_id="r",
    )
    store.commit(pending, state, ("groups.arrow",))


def save_in_child(engine: Any, root: Path, step: int, *, die_at: int) -> tuple[int, int]:
    """Save in a forked process that kills itself at file operation `die_at`; return its wait status and operations."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0

        def count_one() -> None:
            nonlocal count
            count += 1
            os.write(writer, b".")
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event in EVENTS and isinstance(args[0], (str, os.PathLike)) and str(args[0]).startswith(str(root)):
                count_one()

        fsync = os.fsync

        def counted_fsync(descriptor: int) -> None:
            count_one()
            fsync(descriptor)

        os.fsync = counted_fsync
        sys.addaudithook(hook)
        try:
            save(engine, root, step)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        operations = len(pipe.read())
    return os.waitpid(pid, 0)[1], operations


def resume(engine: Any, root: Path) -> int:
    """Do what a new process does, down to every byte; return the step."""
    store = CheckpointStore(root, keep_last=1)
    latest = store.latest()
    assert latest is not None
    checkpoint = store.open(latest.path, run_id="r")
    assert len(read_groups(checkpoint.path / "groups.arrow")) == checkpoint.load_state().buffered
    engine.load(checkpoint.path / "train")
    assert engine.status().optimizer_steps == checkpoint.step
    return checkpoint.step


def test_resume_takes_the_checkpoint_before_when_a_save_is_killed_at_any_file_operation(
    llama_folder: Path, tmp_path: Path
) -> None:
    engine, fresh = make_engine(llama_folder), make_engine(llama_folder)
    engine.train_step(random_batch(), SupervisedLoss())
    before = tmp_path / "before"
    # After this the engine has two steps, which the child's checkpoint of step 2 then holds.
    save(engine, before, 1)
    counting = shutil.copytree(before, tmp_path / "count")
    status, operations = save_in_child(engine, counting, 2, die_at=10**9)
    assert status == 0
    assert operations > 20

    steps = []
    for die_at in range(1, operations + 1):
        root = shutil.copytree(before, tmp_path / str(die_at))
        status, _ = save_in_child(engine, root, 2, die_at=die_at)
        assert status == signal.SIGKILL
        steps.append(resume(fresh, root))

    assert steps == sorted(steps), "the checkpoint before, until the new one is complete"
    assert steps.count(1) > operations // 2
    assert steps[-1] == 2
