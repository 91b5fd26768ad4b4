"""One real run for all audit tests; each test tampers with a copy of its folder."""

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rayrl import Run

# Makes `audit_runs` importable for the tests of this folder, and `hang_code` for workers of a Ray that starts later.
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def finished_run(small_model: Path, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The folder of a run that was stopped after 3 of its steps, resumed, and ended after 5."""
    from audit_runs import small_config

    root = tmp_path_factory.mktemp("runs")
    Run(small_config(small_model, root, 3, {})).train()
    return Run(small_config(small_model, root, 5, {}), resume="auto").train().run_dir


@pytest.fixture
def run_dir(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder to tamper with."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def tamper(run_dir: Path) -> Callable[[str], None]:
    """Change the ledger of the copy as somebody with another program would: triggers and indices do not hold."""

    def change(*statements: str) -> None:
        connection = sqlite3.connect(run_dir / "ledger.sqlite")
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in names:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("DROP INDEX live_prompts")
        connection.execute("DROP INDEX live_steps")
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return change
