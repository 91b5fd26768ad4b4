"""Stacks of another process, also one that never returns to Python."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayrl.infra.stack_dump import dump_stacks

STUCK = """
import threading
from rayrl.infra.stack_dump import answer_stack_dumps
def stuck_here():
    print("ready", flush=True)
    threading.Event().wait(60)
answer_stack_dumps()
stuck_here()
"""


@pytest.fixture
def stuck() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_stacks_name_the_function_that_a_process_is_stuck_in_each_time_it_is_asked(
    stuck: subprocess.Popen[str],
) -> None:
    for _ in range(2):
        assert "stuck_here" in dump_stacks(stuck.pid)
    assert stuck.poll() is None, "asking does not end it"


@pytest.mark.parametrize("has_left_a_file", [False, True])
def test_process_that_is_gone_is_said_to_be(folder_of_dumps: Path, has_left_a_file: bool) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    pid = int(done.stdout)
    if has_left_a_file:
        _old_file(folder_of_dumps, pid)
    assert "does not answer stack dumps, or is gone" in dump_stacks(pid)


def test_process_with_the_id_of_a_killed_one_is_not_ended_by_being_asked(folder_of_dumps: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            _old_file(folder_of_dumps, stranger.pid)
            assert "does not answer stack dumps, or is gone" in dump_stacks(stranger.pid)
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_next_process_that_answers_removes_the_files_of_killed_ones_alone(folder_of_dumps: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    of_the_dead = _old_file(folder_of_dumps, int(done.stdout))
    of_the_living = _old_file(folder_of_dumps, os.getpid())
    subprocess.run(
        [sys.executable, "-c", "from rayrl.infra.stack_dump import answer_stack_dumps; answer_stack_dumps()"],
        env=os.environ | {"TMPDIR": str(folder_of_dumps)},
        check=True,
    )
    assert not of_the_dead.exists()
    assert of_the_living.exists()


@pytest.fixture
def folder_of_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of temporary files of this test alone, without py-spy, which needs no files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    return tmp_path


def _old_file(folder: Path, pid: int) -> Path:
    """Write the file that a process with this id left behind long before the present one started."""
    path = folder / f"rayrl-stacks-{os.getuid()}-{pid}.txt"
    path.write_text("")
    os.utime(path, (0, 0))
    return path
