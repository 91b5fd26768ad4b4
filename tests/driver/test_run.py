"""Whole runs on a real Ray cluster with a tiny model: ledger, versions, checkpoints, resume, stop, failures."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from small_runs import small_run

from rayrl import Run, RunConfig, SFTRun, SFTRunConfig
from rayrl.checkpoint.ledger import Ledger
from rayrl.config.loader import parse_section
from rayrl.driver.evaluate import evaluate
from rayrl.errors import BudgetExhausted, CheckpointError, ConfigError, PlacementError, RunFolderError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def run_config(model: Path, root: Path, **changes: Any) -> RunConfig:
    """Return a small run; `changes` are dotted paths with `__` for the dot."""
    held_out = {
        "dataset": {"type": "arithmetic", "num_operands": 2, "max_operand": 4, "split": "held_out"},
        "sampling": {"temperature": 0, "max_new_tokens": 4},
    }
    return small_run(
        model, root, **{"driver__num_steps": 4, "checkpoint": {"every": 2}, "evaluation": held_out, **changes}
    )


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_asynchronous_run_trains_each_prompt_once_within_the_age_bound(small_model: Path, tmp_path: Path) -> None:
    config = run_config(small_model, tmp_path)

    result = Run(config).train()

    assert (result.status, result.steps) == ("done", 4)
    ledger = Ledger.open(result.run_dir / "ledger.sqlite", read_only=True)
    outcomes = ledger.outcomes()
    ledger.close()
    assert len(outcomes) == len({item.outcome.prompt_id for item in outcomes}) == 16
    assert {item.outcome.outcome for item in outcomes} == {"trained"}
    for item in outcomes:
        assert item.outcome.oldest_version is not None
        # Step s makes version s from version s - 1.
        assert 0 <= item.version - 1 - item.outcome.oldest_version <= 2
    steps = [row for row in metrics_of(result.run_dir) if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["staleness/age_max"] <= 2 for row in steps)
    assert result.metrics["eval/version"] == 4
    assert result.metrics["eval/other_version_share"] == 0
    assert (result.run_dir / "export" / "config.json").is_file()


def test_rollout_log_has_a_version_on_each_sampled_token_and_on_no_other(small_model: Path, tmp_path: Path) -> None:
    result = Run(run_config(small_model, tmp_path, driver__num_steps=2)).train()
    tables = [pq.read_table(path).to_pylist() for path in sorted((result.run_dir / "rollouts").glob("*.parquet"))]
    rows = [row for table in tables for row in table]
    assert len(rows) == 2 * 4 * 4
    for row in rows:
        assert [version >= 0 for version in row["versions"]] == [bool(mask) for mask in row["loss_mask"]]
        assert all(logprob <= 0 for logprob in row["logprobs"])


def test_staleness_zero_is_on_policy_with_every_age_zero_and_ratio_one(small_model: Path, tmp_path: Path) -> None:
    result = Run(run_config(small_model, tmp_path, driver__max_staleness=0)).train()
    steps = [row for row in metrics_of(result.run_dir) if "reward/mean" in row]
    assert [row["staleness/age_max"] for row in steps] == [0, 0, 0, 0]
    assert all(abs(row["mismatch/abs_logprob_diff"]) < 1e-4 for row in steps)


def test_resumed_run_goes_on_at_the_checkpoint_and_trains_no_prompt_twice(small_model: Path, tmp_path: Path) -> None:
    first = Run(run_config(small_model, tmp_path, driver__num_steps=2)).train()
    second = Run(run_config(small_model, tmp_path, driver__num_steps=5), resume="auto").train()

    assert (first.steps, second.steps) == (2, 5)
    assert second.metrics["train/version"] == 5
    ledger = Ledger.open(second.run_dir / "ledger.sqlite", read_only=True)
    outcomes = ledger.outcomes()
    ledger.close()
    assert len(outcomes) == len({item.outcome.prompt_id for item in outcomes}) == 20
    assert sorted({item.step for item in outcomes}) == [1, 2, 3, 4, 5]
    # Nothing skipped either: the outcomes are the first twenty prompts of the shuffled order.
    ordinals = sorted((item.outcome.prompt_id.epoch, item.outcome.prompt_id.ordinal) for item in outcomes)
    assert ordinals[-1] <= (0, 31)


def test_run_goes_on_from_a_checkpoint_that_holds_finished_groups(small_model: Path, tmp_path: Path) -> None:
    # Staleness 3 and steps that wait for evaluations: groups of later steps are ready when a step is saved.
    changes = {"driver__max_staleness": 3, "evaluation__every": 1, "checkpoint__every": 1, "checkpoint__keep_last": 9}
    first = Run(run_config(small_model, tmp_path, driver__num_steps=5, **changes)).train()
    saved = sorted((first.run_dir / "checkpoints").glob("step_*"))
    held = [json.loads((path / "state.json").read_text())["buffered"] for path in saved]
    chosen = saved[max(range(len(saved)), key=lambda index: held[index])]
    assert max(held) > 0

    second = Run(run_config(small_model, tmp_path, driver__num_steps=6, **changes), resume=chosen).train()

    assert (second.status, second.steps) == ("done", 6)
    ledger = Ledger.open(second.run_dir / "ledger.sqlite", read_only=True)
    outcomes = ledger.outcomes()
    ledger.close()
    assert len(outcomes) == len({item.outcome.prompt_id for item in outcomes}) == 24


def test_stopped_run_finishes_its_step_saves_and_says_stopped(small_model: Path, tmp_path: Path) -> None:
    run = Run(run_config(small_model, tmp_path, driver__num_steps=10_000))
    handle = run.start()
    metrics = tmp_path / "small" / "metrics.jsonl"
    while not (metrics.exists() and "reward/mean" in metrics.read_text()):
        assert handle.status()["phase"] != "failed", handle.wait()
        handle._thread.join(0.2)
    handle.stop()
    result = handle.wait(timeout_s=120)
    assert result.status == "stopped"
    assert 0 < result.steps < 10_000
    assert (result.run_dir / "checkpoints" / f"step_{result.steps:06d}" / "manifest.json").is_file()


def test_resume_is_refused_when_the_run_has_more_steps_than_are_asked_for(small_model: Path, tmp_path: Path) -> None:
    Run(run_config(small_model, tmp_path, driver__num_steps=2)).train()
    with pytest.raises(CheckpointError, match=r"has 2 steps already, driver\.num_steps=1"):
        Run(run_config(small_model, tmp_path, driver__num_steps=1), resume="auto").train()
    assert metrics_of(tmp_path / "small")[-1]["step"] == 2


def test_resume_from_a_checkpoint_without_its_run_folder_leaves_no_folder(small_model: Path, tmp_path: Path) -> None:
    first = Run(run_config(small_model, tmp_path, driver__num_steps=1)).train()
    (checkpoint,) = (first.run_dir / "checkpoints").glob("step_*")
    with pytest.raises(CheckpointError, match="belongs to run"):
        Run(run_config(small_model, tmp_path, run__name="other", driver__num_steps=2), resume=checkpoint).train()
    assert not (tmp_path / "other").exists()


def test_run_folder_of_another_run_is_refused_and_left_as_it_is(small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"thesis\.txt"):
        Run(run_config(small_model, tmp_path)).train()
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_resume_with_another_learning_rate_is_refused_with_both_values(small_model: Path, tmp_path: Path) -> None:
    Run(run_config(small_model, tmp_path, driver__num_steps=1)).train()
    with pytest.raises(CheckpointError, match=r"training\.optimizer\.lr.*0\.001.*0\.5"):
        Run(run_config(small_model, tmp_path, training__optimizer__lr=0.5), resume="auto").train()


def test_more_cpus_than_the_cluster_has_is_refused_and_leaves_no_folder(small_model: Path, tmp_path: Path) -> None:
    config = run_config(small_model, tmp_path, training__cpus_per_worker=64, driver__deadlines={"placement_s": 1})
    with pytest.raises(PlacementError, match=r"CPU"):
        Run(config).train()
    assert not (tmp_path / "small").exists()


def test_reward_that_always_fails_ends_the_run_after_its_budget_with_the_cause(
    small_model: Path, tmp_path: Path
) -> None:
    config = run_config(
        small_model,
        tmp_path,
        # A prompt and a text cannot be added: TypeError on every call.
        reward={"type": "function", "path": "operator:add"},
        driver__max_failed_groups=3,
        evaluation=None,
    )
    with pytest.raises(BudgetExhausted, match=r"4 groups without a usable trajectory in a row.*reward"):
        Run(config).train()
    assert "BudgetExhausted" in (tmp_path / "small" / "logs" / "failure.txt").read_text()


def test_two_engines_get_the_same_weights_and_both_acknowledge(small_model: Path, tmp_path: Path) -> None:
    result = Run(run_config(small_model, tmp_path, inference__num_engines=2, driver__num_steps=2)).train()
    assert result.steps == 2
    assert result.metrics["eval/other_version_share"] == 0


def test_two_training_ranks_train_together(small_model: Path, tmp_path: Path) -> None:
    result = Run(run_config(small_model, tmp_path, training__parallel__data=2, driver__num_steps=2)).train()
    assert result.steps == 2


def test_colocated_placement_runs(small_model: Path, tmp_path: Path) -> None:
    result = Run(run_config(small_model, tmp_path, placement__mode="colocated", driver__num_steps=2)).train()
    assert result.steps == 2


def test_supervised_run_lowers_its_loss_and_exports_a_model_that_can_be_evaluated(
    small_model: Path, tmp_path: Path
) -> None:
    data = {
        "run": {"name": "sft", "output_root": str(tmp_path)},
        "model": {"path": str(small_model)},
        "dataset": {"type": "arithmetic", "num_operands": 2, "max_operand": 4},
        "sft": {"num_steps": 20, "batch_size": 16, "prompt_format": "text"},
        "training": {"optimizer": {"lr": 3e-3}},
        "tracking": {"sinks": ["jsonl"]},
    }
    result = SFTRun(parse_section(SFTRunConfig, data)).train()
    assert result.metrics["loss/last"] < 0.7 * result.metrics["loss/first"]
    evaluated = evaluate(run_config(small_model, tmp_path), str(result.run_dir / "export"))
    assert 0 <= evaluated.metrics["eval/accuracy"] <= 1
    assert evaluated.metrics["eval/prompts"] > 0


def test_model_without_chat_template_is_refused_before_anything_starts(small_model: Path, tmp_path: Path) -> None:
    config = run_config(small_model, tmp_path, rollout__workflow={"type": "single_turn"})
    with pytest.raises(ConfigError, match="no chat template"):
        Run(config).train()
    assert not (tmp_path / "small").exists()


def test_sigterm_leaves_with_the_stopped_code_and_no_process_behind(small_model: Path, tmp_path: Path) -> None:
    config = run_config(small_model, tmp_path, driver__num_steps=10_000)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    metrics = tmp_path / "small" / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "rayrl.cli.main", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while not (metrics.exists() and "reward/mean" in metrics.read_text()):
            assert process.poll() is None, process.communicate()[0]
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 3, output
    assert list((tmp_path / "small" / "checkpoints").glob("step_*/manifest.json"))
    assert not processes_of_session(process.pid)


def processes_of_session(session: int) -> list[int]:
    """Return the pids of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def test_result_is_a_frozen_record(small_model: Path, tmp_path: Path) -> None:
    result = Run(run_config(small_model, tmp_path, driver__num_steps=1, evaluation=None)).train()
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.steps = 7  # type: ignore[misc]
