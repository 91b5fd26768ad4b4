"""How a run ends is how the command ends: summary, exit code, error block. The driver is a fake module."""

import re
import sys
from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rayrl.cli.exit_code import ExitCode, exit_code_of
from rayrl.cli.failure import failure_text
from rayrl.cli.main import main
from rayrl.errors import (
    ActorError,
    CheckpointError,
    ConfigError,
    DatasetError,
    DeadlineExceeded,
    PlacementError,
    RayrlError,
    RunFolderError,
)

CONFIG = """
run: {name: small, output_root: out}
model: {path: models/small}
dataset: {type: arithmetic}
reward: {type: exact_match}
rollout:
  workflow: {type: single_turn}
  group_size: 4
  sampling: {max_new_tokens: 8}
driver: {groups_per_step: 2, num_steps: 3}
training: {optimizer: {lr: 1e-5}}
inference: {engine: {type: scripted}}
"""
SFT_CONFIG = """
run: {name: warm, output_root: out}
model: {path: models/small}
dataset: {type: arithmetic}
sft: {num_steps: 1, batch_size: 1}
training: {optimizer: {lr: 1e-5}}
"""
METRICS = {"eval/accuracy_before": 0.612, "eval/accuracy": 0.95, "other": 3.0}


@dataclass(frozen=True, kw_only=True)
class FakeResult:
    """What a run returns."""

    metrics: dict[str, float]
    run_dir: Path
    status: str
    steps: int


class FakeDriver:
    """Stands for the driver: keeps what it was called with, ends as it is told."""

    def __init__(self, outcome: Callable[[], FakeResult]) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        self.outcome = outcome

    def module(self, name: str) -> ModuleType:
        """Return a module with the names that the commands import."""
        module = ModuleType(name)
        module.Run = lambda config, resume: self._runner("run", config, resume)  # type: ignore[attr-defined]
        module.SFTRun = lambda config, resume: self._runner("sft", config, resume)  # type: ignore[attr-defined]
        module.evaluate = lambda config, model: self._runner("eval", config, model).train()  # type: ignore[attr-defined]
        return module

    def _runner(self, kind: str, config: Any, detail: Any) -> Any:
        self.calls.append((kind, config, detail))
        runner = ModuleType("runner")
        runner.train = self.outcome  # type: ignore[attr-defined]
        return runner


def finished(status: str = "done") -> FakeResult:
    """A run that went to its end."""
    return FakeResult(metrics=METRICS, run_dir=Path("out/small"), status=status, steps=3)


def failing(error: BaseException) -> Callable[[], FakeResult]:
    """Return a run that raises."""

    def fail() -> FakeResult:
        raise error

    return fail


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], FakeResult], list[str]], tuple[object, FakeDriver]]:
    """Run a command against a fake driver; return its exit code and the driver."""
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "sft.yaml").write_text(SFT_CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(outcome: Callable[[], FakeResult], arguments: list[str]) -> tuple[object, FakeDriver]:
        driver = FakeDriver(outcome)
        for name in ("rayrl.driver.run", "rayrl.driver.sft", "rayrl.driver.evaluate"):
            monkeypatch.setitem(sys.modules, name, driver.module(name))
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return caught.value.code, driver

    return run


def test_summary_names_accuracy_steps_and_folder_when_a_run_is_done(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, driver = start(finished, ["train", "run.yaml", "driver.num_steps=7"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert driver.calls[0][1].driver.num_steps == 7
    assert lines == [
        "train: status = done",
        "train: steps = 3",
        "train: accuracy before = 0.612",
        "train: accuracy after = 0.95",
        "train: run folder = out/small",
    ]


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [([], "never"), (["--resume", "auto"], "auto"), (["--resume", "out/small/checkpoints/step-3"], None)],
)
def test_resume_reaches_the_driver_when_it_is_given(start: Any, arguments: list[str], resume: str | None) -> None:
    _, driver = start(finished, ["train", "run.yaml", *arguments])

    assert driver.calls[0][2] == (Path(arguments[1]) if resume is None else resume)


def test_exit_code_is_3_when_the_run_was_stopped(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = start(lambda: finished("stopped"), ["train", "run.yaml"])

    assert code == 3
    assert "--resume auto" in capsys.readouterr().out


def test_sft_runs_the_supervised_loop_when_it_is_called(start: Any) -> None:
    code, driver = start(finished, ["sft", "sft.yaml", "sft.batch_size=5"])

    assert code == 0
    assert [(kind, config.sft.batch_size) for kind, config, _ in driver.calls] == [("sft", 5)]


@pytest.mark.parametrize(("arguments", "model"), [([], None), (["--model", "models/other"], "models/other")])
def test_eval_takes_another_model_when_one_is_given(
    start: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], model: str | None
) -> None:
    code, driver = start(finished, ["eval", "run.yaml", *arguments])

    assert code == 0
    assert [(kind, detail) for kind, _, detail in driver.calls] == [("eval", model)]
    assert "eval: eval/accuracy = 0.95" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), 2),
        (DatasetError("a"), 2),
        (RunFolderError("a"), 2),
        (PlacementError("a"), 2),
        (CheckpointError("a"), 2),
        (ActorError("a"), 1),
        (DeadlineExceeded("a"), 1),
        (KeyError("a"), 1),
        (KeyboardInterrupt(), 130),
        (CancelledError(), 130),
    ],
)
def test_exit_code_follows_the_error_when_a_run_fails(start: Any, error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code
    assert start(failing(error), ["train", "run.yaml"])[0] == code


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, PlacementError])
def test_exit_code_is_1_when_the_run_had_begun_whatever_the_error(start: Any, kind: type[RayrlError]) -> None:
    error = kind("cannot write checkpoint: no space left on device")
    error.after_start = True
    assert start(failing(error), ["train", "run.yaml"])[0] == 1


def without_log_lines(text: str) -> str:
    """Return what is left of stderr without the lines of the logger, which begin with the time."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"\d\d:\d\d:\d\d [DIWE] \[", line))


def test_error_is_one_block_without_traceback_when_it_is_one_of_ours(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    start(failing(PlacementError("asks for 9 CPUs, the cluster has 2")), ["train", "run.yaml"])

    assert without_log_lines(capsys.readouterr().err) == "error: asks for 9 CPUs, the cluster has 2\n"


def test_traceback_and_run_folder_are_shown_when_an_error_is_unexpected(
    start: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "out" / "small").mkdir(parents=True)

    start(failing(KeyError("lost")), ["train", "run.yaml"])

    stderr = capsys.readouterr().err
    assert "Traceback (most recent call last)" in stderr
    assert stderr.endswith("error: unexpected KeyError: 'lost'\n  run folder: out/small\n")


def test_folder_of_an_earlier_run_is_not_named_when_the_input_is_bad(
    start: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "out" / "small").mkdir(parents=True)

    start(failing(ConfigError("no such model")), ["train", "run.yaml"])

    assert without_log_lines(capsys.readouterr().err) == "error: no such model\n"


def test_error_of_a_remote_call_is_shown_as_itself_when_it_is_one_of_ours(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.exceptions import RayTaskError

    remote = RayTaskError("load", "a long remote traceback", ConfigError("no such model"))

    code, _ = start(failing(remote), ["train", "run.yaml"])

    assert code == 2
    assert without_log_lines(capsys.readouterr().err) == "error: no such model\n"


def test_exit_codes_are_distinct_when_they_are_listed() -> None:
    assert sorted(ExitCode) == [0, 1, 2, 3, 130]


def test_failure_text_keeps_every_line_when_a_message_has_several() -> None:
    assert failure_text(ConfigError("two faults:\n  a\n  b")) == "error: two faults:\n  a\n  b"


def test_older_accuracy_is_not_called_after_when_the_last_version_was_not_evaluated(tmp_path: Path) -> None:
    from rayrl.cli.summary import summary_rows
    from rayrl.driver.result import RunResult

    metrics = {"eval/accuracy": 0.1, "eval/accuracy_before": 0.1, "eval/version": 0.0, "train/version": 25.0}
    rows = summary_rows(RunResult(status="stopped", steps=25, metrics=metrics, run_dir=tmp_path))
    assert "accuracy after" not in dict(rows)
    assert dict(rows)["accuracy before"] == "0.1"
