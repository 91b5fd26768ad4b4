"""A resume of a run that is done: its result comes from what it left, and nothing is started."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import RUN_ENDED, RUN_STARTED
from rayrl.config.digest import digest_of
from rayrl.config.run import RunConfig
from rayrl.driver.assembly import resolved_yaml
from rayrl.driver.finished import finished_result
from rayrl.driver.run_history import read_history
from rayrl.driver.train_loop import summary_metrics
from rayrl.tracking.run_folder import RunFolder


@pytest.fixture
def config(repo_root: Path, tmp_path: Path) -> RunConfig:
    overrides = [f"run.output_root={tmp_path}", "driver.num_steps=2", "checkpoint.export_hf=true"]
    return RunConfig.load(repo_root / "configs" / "quickstart_grpo.yaml", overrides)


def leave_run(config: RunConfig, status: str = "done", steps: int = 2) -> RunFolder:
    """Make the folder that a run with these steps leaves."""
    text = resolved_yaml(config)
    folder = RunFolder.create(config.run_dir, text, digest_of(text), ["rayrl"], resume=False)
    (folder.export / "config.json").write_text("{}")
    ledger = Ledger.open(folder.ledger_path)
    ledger.record_event(RUN_STARTED, 0, {})
    for step in range(1, steps + 1):
        ledger.record_step(step, step, [])
    ledger.record_event(RUN_ENDED, steps, {"status": status})
    ledger.close()
    rows = [
        {"step": 0, "time": 1.0, "eval/accuracy": 0.25, "eval/version": 0},
        {"step": 1, "time": 2.0, "reward/mean": 0.5},
        {"step": 2, "time": 3.0, "reward/mean": 0.25},
        {"step": 2, "time": 4.0, "reward/mean": 0.75},
        {"step": 2, "time": 5.0, "eval/accuracy": 0.5, "eval/version": 2},
    ]
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def result_of(folder: RunFolder, config: RunConfig, step: int = 2) -> Any:
    checkpoint: Any = SimpleNamespace(step=step)
    return finished_result(folder, config, checkpoint, resolved_yaml(config))


def test_result_of_a_finished_run_is_told_from_its_folder(config: RunConfig) -> None:
    result = result_of(leave_run(config), config)

    assert (result.status, result.steps, result.run_dir) == ("done", 2, config.run_dir.absolute())
    metrics = result.metrics
    assert (metrics["eval/accuracy_before"], metrics["eval/accuracy"]) == (0.25, 0.5)
    assert (metrics["reward/first"], metrics["reward/last"]) == (0.5, 0.75), "the last try of step 2 counts"


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_run_that_did_not_end_as_done_goes_on(config: RunConfig, status: str) -> None:
    assert result_of(leave_run(config, status=status), config) is None


def test_run_goes_on_when_steps_are_missing_or_an_earlier_checkpoint_is_given(config: RunConfig) -> None:
    folder = leave_run(config, steps=1)
    assert result_of(folder, config) is None
    assert result_of(folder, config, step=1) is None


def test_run_goes_on_when_its_export_is_gone_or_the_config_is_another(config: RunConfig) -> None:
    folder = leave_run(config)
    other = config.model_copy(update={"driver": config.driver.model_copy(update={"max_failed_groups": 5})})
    assert result_of(folder, other) is None
    (folder.export / "config.json").unlink()
    assert result_of(folder, config) is None


def test_history_ends_where_a_run_goes_on_from(config: RunConfig) -> None:
    history = read_history(leave_run(config).metrics_path, 1)
    assert (history.accuracies, history.reward_means) == ([0.25], [0.5])
    assert summary_metrics(history)["eval/accuracy_before"] == 0.25


def test_history_is_empty_when_the_run_wrote_no_lines(tmp_path: Path) -> None:
    assert read_history(tmp_path / "metrics.jsonl", 1).accuracies == []
