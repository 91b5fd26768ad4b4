"""Stacks of another process, also one that never returns to Python."""

import subprocess
import sys
from collections.abc import Iterator

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


def test_process_that_is_gone_is_said_to_be() -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    assert "does not answer stack dumps, or is gone" in dump_stacks(int(done.stdout))
