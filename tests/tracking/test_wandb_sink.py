"""The wandb sink: offline without a key, and nothing left behind."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rayrl.config.tracking import TrackingConfig
from rayrl.errors import ConfigError
from rayrl.tracking.registry import check_sinks
from rayrl.tracking.wandb_sink import resolve_mode

URL = "https://api.wandb.ai"

SMOKE = """
import json, os, sys
from pathlib import Path
from rayrl.config.tracking import TrackingConfig
from rayrl.tracking.registry import make_tracker
from rayrl.tracking.run_folder import RunFolder

def children():
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(stat.parent.name)
    return found

with RunFolder.create(sys.argv[1], "run: {name: one}\\n", "d", ["x"], resume=False) as folder:
    tracker = make_tracker(TrackingConfig(sinks=("wandb",)), folder, num_steps=2)
    during = len(children())
    tracker.log(1, {"reward/mean": 0.5})
    tracker.log(2, {"reward/mean": float("nan")})
    tracker.close()
    print(json.dumps({"during": during, "after": len(children()), "run_id": folder.run_id}))
"""


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user without a key; returns the path of the netrc file, which does not exist."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


@pytest.mark.usefixtures("no_key")
def test_auto_is_offline_without_a_key() -> None:
    assert resolve_mode("auto", URL) == "offline"


@pytest.mark.usefixtures("no_key")
def test_auto_is_online_with_a_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")

    assert resolve_mode("auto", URL) == "online"
    assert resolve_mode("offline", URL) == "offline"


@pytest.mark.parametrize(("host", "mode"), [("api.wandb.ai", "online"), ("elsewhere.example", "offline")])
def test_auto_looks_for_the_host_in_netrc(no_key: Path, host: str, mode: str) -> None:
    no_key.write_text(f"machine {host}\n  login user\n  password k\n")

    assert resolve_mode("auto", URL) == mode


def test_missing_package_is_a_config_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(ConfigError, match=r"pip install 'rayrl\[wandb\]'"):
        check_sinks(TrackingConfig(sinks=("jsonl", "wandb")))
    check_sinks(TrackingConfig(sinks=("jsonl",)))


@pytest.mark.usefixtures("no_key")
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed; pip install 'rayrl[wandb]'")
def test_offline_run_is_written_below_the_folder_and_leaves_no_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMOKE, str(tmp_path / "one")], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["during"] > 0, "the run was open"
    assert report["after"] == 0
    [run_dir] = (tmp_path / "one" / "wandb").glob("offline-run-*")
    assert (run_dir / f"run-{report['run_id']}.wandb").stat().st_size > 0
