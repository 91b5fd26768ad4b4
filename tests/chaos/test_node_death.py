"""The node of an engine is lost: its raylet is killed, and everything that ran there goes with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.ray
@pytest.mark.chaos
@pytest.mark.slow
def test_engine_of_a_lost_node_is_replaced_on_another_one(small_model: Path, tmp_path: Path) -> None:
    script = Path(__file__).parent / "node_death.py"
    done = subprocess.run(
        [sys.executable, str(script), str(small_model), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
