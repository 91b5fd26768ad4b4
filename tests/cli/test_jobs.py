"""The scripts of `jobs/`: what is submitted, and how a script uses the public API. Ray and the driver are fakes."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray.exceptions import AuthenticationError

JOBS = Path(__file__).resolve().parents[2] / "jobs"
CONFIG = JOBS.parent / "configs" / "smollm2_chain_sum.yaml"


def load(name: str) -> ModuleType:
    """Load a script as a module."""
    spec = importlib.util.spec_from_file_location(f"jobs_{name}", JOBS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeHandle:
    """A run that is finished, or is interrupted once while it is waited for."""

    def __init__(self, interrupted: bool) -> None:
        self.interrupted = interrupted
        self.stopped = False

    def status(self) -> dict[str, Any]:
        """One record."""
        return {"phase": "training"}

    def stop(self) -> None:
        """Remember the call."""
        self.stopped = True

    def wait(self) -> Any:
        """Return a result, or be interrupted first."""
        if self.interrupted and not self.stopped:
            raise KeyboardInterrupt
        result = ModuleType("result")
        result.status = "stopped" if self.stopped else "done"  # type: ignore[attr-defined]
        result.steps = 3  # type: ignore[attr-defined]
        result.run_dir = Path("runs/x")  # type: ignore[attr-defined]
        result.metrics = {"reward/last": 0.5}  # type: ignore[attr-defined]
        return result


@pytest.mark.parametrize(("interrupted", "end"), [(False, "done after 3 steps"), (True, "stopped after 3 steps")])
def test_driver_script_reports_the_end_when_the_run_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupted: bool, end: str
) -> None:
    import rayrl

    handle = FakeHandle(interrupted)
    configs: list[Any] = []

    class FakeRun:
        def __init__(self, config: Any) -> None:
            configs.append(config)

        def start(self) -> FakeHandle:
            return handle

    monkeypatch.setitem(rayrl.__dict__, "Run", FakeRun)

    load("driver_script").main(str(CONFIG), ["driver.num_steps=3"])

    out = capsys.readouterr().out
    assert configs[0].driver.num_steps == 3
    assert f"{end}: runs/x" in out
    assert "reward/last = 0.5" in out
    assert handle.stopped is interrupted


def test_job_runs_here_when_nothing_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)

    line = load("submit").entrypoint(["train", "x.yaml", "run.name=a b"], uploads=False)

    assert line.startswith(f"cd '{folder}' && exec ")
    assert line.endswith("-m rayrl.cli.main train x.yaml 'run.name=a b'")


def test_job_uses_the_python_of_the_cluster_when_the_folder_is_uploaded() -> None:
    assert load("submit").entrypoint(["train", "x.yaml"], uploads=True) == "python -m rayrl.cli.main train x.yaml"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AuthenticationError("Authentication required: Unauthorized: Missing token"), "ray get-auth-token"),
        (ConnectionError("Failed to connect to Ray at address: x"), "no cluster at"),
    ],
)
def test_fix_is_named_when_the_cluster_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    submit = load("submit")

    def refuse(address: str | None) -> None:
        raise error

    monkeypatch.setattr(submit, "JobSubmissionClient", refuse)

    with pytest.raises(SystemExit) as caught:
        submit.connect(None)

    assert said in str(caught.value.code)
    assert error.args[0] in str(caught.value.code)
