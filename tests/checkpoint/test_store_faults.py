"""A commit that is cut off at every call to the disk: resume takes the previous checkpoint, or the new one whole."""

import errno
import os
from pathlib import Path

import pytest

from rayrl.checkpoint.disk import Disk
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import Checkpoint, CheckpointStore
from rayrl.errors import CheckpointError


class ProcessKilled(BaseException):
    """Stands for SIGKILL: no handler of an ordinary exception runs, and the dead process does nothing more."""


class CutOffDisk(Disk):
    """Dies at call number `cut_at` (1-based); a write that is cut off has written half of its bytes."""

    def __init__(self, cut_at: int) -> None:
        self.cut_at = cut_at
        self.calls: list[str] = []

    @property
    def died(self) -> bool:
        return len(self.calls) >= self.cut_at

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", path)
        super().make_folder(path)

    def write(self, path: Path, data: bytes) -> None:
        if len(self.calls) + 1 == self.cut_at:
            super().write(path, data[: len(data) // 2])
        self._count("write", path)
        super().write(path, data)

    def sync_file(self, path: Path) -> None:
        self._count("sync_file", path)
        super().sync_file(path)

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder", path)
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename", target)
        super().rename(source, target)

    def remove_tree(self, path: Path) -> None:
        if len(self.calls) + 1 == self.cut_at:
            next(item for item in sorted(path.rglob("*")) if item.is_file()).unlink()
        self._count("remove_tree", path)
        super().remove_tree(path)

    def _count(self, call: str, path: Path) -> None:
        self.calls.append(f"{call} {path.name}")
        if self.died:
            raise ProcessKilled


class PowerCutDisk(CutOffDisk):
    """As `CutOffDisk`, but the machine loses power: what was not synced is gone.

    Files that were never synced become empty, names in folders that were not synced since vanish. A rename is taken
    to have reached the disk at once: the worse of the two cases.
    """

    def __init__(self, cut_at: int, root: Path) -> None:
        super().__init__(cut_at)
        self._root = root
        self._synced_files: set[int] = set()
        self._synced_names: dict[int, set[str]] = {}

    def sync_file(self, path: Path) -> None:
        super().sync_file(path)
        self._synced_files.add(path.stat().st_ino)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._synced_names[path.stat().st_ino] = {item.name for item in path.iterdir()}

    def lose_power(self, earlier: set[Path]) -> None:
        """Take away what was not synced, except in the folders of checkpoints that were complete before."""
        for folder in [item for item in self._root.iterdir() if item not in earlier]:
            for path in sorted(folder.rglob("*"), reverse=True):
                names = self._synced_names.get(path.parent.stat().st_ino, set())
                if path.is_file() and path.name not in names:
                    path.unlink()
                elif path.is_file() and path.stat().st_ino not in self._synced_files:
                    os.truncate(path, 0)


class FailingDisk(CutOffDisk):
    """Raises one OSError at call number `cut_at` and works before and after."""

    def __init__(self, cut_at: int, code: int = errno.ENOSPC) -> None:
        super().__init__(cut_at)
        self._code = code

    def _count(self, call: str, path: Path) -> None:
        self.calls.append(f"{call} {path.name}")
        if len(self.calls) == self.cut_at:
            raise OSError(self._code, os.strerror(self._code), str(path))


def state(step: int) -> RunState:
    return RunState(
        step=step,
        version=step,
        dataset_state={"frontier": step * 16},
        buffered=0,
        ledger_position=step,
        consumed=step * 16,
        config_digest="c",
        run_id="r",
    )


def save(store: CheckpointStore, step: int) -> Path:
    """Do what the driver and two workers do."""
    pending = store.begin(step)
    (pending.path / "model").mkdir()
    for rank in (0, 1):
        (pending.path / "model" / f"rank_{rank}.bin").write_bytes(bytes([step]) * 1000)
    return store.commit(pending, state(step), expected=("model/rank_0.bin", "model/rank_1.bin"))


def resume(root: Path) -> Checkpoint:
    """Do what a new process does: find the latest checkpoint and read all of it."""
    store = CheckpointStore(root, keep_last=1)
    latest = store.latest()
    assert latest is not None, "there is always a checkpoint"
    opened = store.open(latest.path, run_id="r")
    assert opened.load_state() == state(opened.step)
    return opened


def num_calls_of_a_save(root: Path) -> int:
    """Return how many calls a save after an earlier one makes, the removal of the earlier one included."""
    save(CheckpointStore(root, keep_last=1), 1)
    disk = CutOffDisk(cut_at=10**9)
    save(CheckpointStore(root, keep_last=1, disk=disk), 2)
    assert [call.split()[0] for call in disk.calls[-4:]] == ["rename", "sync_folder", "rename", "remove_tree"]
    return len(disk.calls)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_save_killed_at_any_call_leaves_the_previous_checkpoint_or_the_whole_new_one(
    tmp_path: Path, keep_last: int
) -> None:
    num_calls = num_calls_of_a_save(tmp_path / "count") - (keep_last == 2) * 2
    resumed_from: list[int] = []

    for cut_at in range(1, num_calls + 1):
        root = tmp_path / str(cut_at)
        save(CheckpointStore(root, keep_last=keep_last), 1)
        disk = CutOffDisk(cut_at)
        with pytest.raises(ProcessKilled):
            save(CheckpointStore(root, keep_last=keep_last, disk=disk), 2)

        step = resume(root).step
        resumed_from.append(step)
        renamed = "rename step_000002" in disk.calls[: cut_at - 1]
        assert step == (2 if renamed else 1), f"cut off at {disk.calls[-1]}"

        save(CheckpointStore(root, keep_last=keep_last), step + 1)
        assert resume(root).step == step + 1
        assert not list(root.glob(".tmp-*")), "the next run removes what the dead one left"

    assert resumed_from.count(1) > num_calls // 2, "most calls come before the rename"
    assert resumed_from == sorted(resumed_from)


def test_save_cut_off_by_a_power_failure_at_any_call_leaves_a_checkpoint_with_all_its_bytes(tmp_path: Path) -> None:
    num_calls = num_calls_of_a_save(tmp_path / "count")

    for cut_at in range(1, num_calls + 1):
        root = tmp_path / str(cut_at)
        earlier = save(CheckpointStore(root, keep_last=1), 1)
        disk = PowerCutDisk(cut_at, root)
        with pytest.raises(ProcessKilled):
            save(CheckpointStore(root, keep_last=1, disk=disk), 2)
        disk.lose_power({earlier})

        assert resume(root).step == (2 if "rename step_000002" in disk.calls[: cut_at - 1] else 1)


def test_first_save_killed_at_any_call_leaves_no_checkpoint_or_the_whole_new_one(tmp_path: Path) -> None:
    disk = CutOffDisk(cut_at=10**9)
    save(CheckpointStore(tmp_path / "count", keep_last=1, disk=disk), 1)

    for cut_at in range(1, len(disk.calls) + 1):
        root = tmp_path / str(cut_at)
        cut_disk = CutOffDisk(cut_at)
        with pytest.raises(ProcessKilled):
            save(CheckpointStore(root, keep_last=1, disk=cut_disk), 1)

        latest = CheckpointStore(root, keep_last=1).latest()
        assert (latest is not None) == ("rename step_000001" in cut_disk.calls[: cut_at - 1])


def test_full_disk_at_any_call_is_an_error_that_names_it_and_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    num_calls = num_calls_of_a_save(tmp_path / "count")
    errors: list[str] = []

    for cut_at in range(1, num_calls + 1):
        root = tmp_path / str(cut_at)
        save(CheckpointStore(root, keep_last=1), 1)
        disk = FailingDisk(cut_at)
        store = CheckpointStore(root, keep_last=1, disk=disk)
        try:
            save(store, 2)
        except CheckpointError as error:
            errors.append(str(error))
        assert len(list(root.glob(".tmp-*"))) == (cut_at == num_calls), "the space is given back"
        assert resume(root).step == (2 if "rename step_000002" in disk.calls[: cut_at - 1] else 1)
        save(store, 3)
        assert resume(root).step == 3, "the same store goes on once there is space"

    assert len(errors) == num_calls - 2, "only the removal of the old checkpoint may fail without an error"
    assert all("No space left on device" in text and str(tmp_path) in text for text in errors)


def test_worker_files_on_a_full_disk_can_be_abandoned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    pending = store.begin(2)
    (pending.path / "part.bin").write_bytes(b"half")

    store.abandon(pending)
    store.abandon(pending)

    assert [item.name for item in tmp_path.iterdir()] == ["step_000001"]
