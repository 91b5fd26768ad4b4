"""Runs beyond plain policy gradients on a real cluster: a critic, pairs, a reward model and a teacher as roles."""

import json
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from small_runs import small_run

from rayrl import PreferenceRun, PreferenceRunConfig, RewardModelRun, RewardModelRunConfig, Run, RunConfig
from rayrl.config.checkpoint import CheckpointConfig
from rayrl.config.loader import parse_section
from rayrl.config.training import TrainingConfig
from rayrl.errors import CheckpointError, ConfigError, DatasetError, ModelError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

_SUMS = {"type": "arithmetic", "num_operands": 2, "max_operand": 4}


def _rl(model: Path, root: Path, **changes: Any) -> RunConfig:
    return small_run(model, root, **{"driver__num_steps": 3, "driver__max_staleness": 1, **changes})


def _pairs(kind: type[Any], section: str, model: Path, root: Path, **loop: Any) -> Any:
    data = {
        "run": {"name": section, "output_root": str(root)},
        "model": {"path": str(model)},
        "dataset": {**_SUMS, "with_rejected": True},
        section: {"num_steps": 30, "batch_size": 20, "prompt_format": "text", **loop},
        "training": {"optimizer": {"lr": 3e-3}},
        "evaluation": {"dataset": {**_SUMS, "split": "held_out", "with_rejected": True}, "every": 10},
        "tracking": {"sinks": ["jsonl"]},
    }
    return parse_section(kind, data)


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of training steps; others are of evaluations and checkpoints."""
    return [row for row in _metrics(run_dir) if "reward/mean" in row]


@pytest.fixture(scope="module")
def reward_model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a small run."""
    root = tmp_path_factory.mktemp("reward_model")
    return RewardModelRun(_pairs(RewardModelRunConfig, "reward_model", small_model, root)).train()


def test_a_reward_model_ends_with_more_training_pairs_in_order_and_an_export(reward_model: Any) -> None:
    rows = _metrics(reward_model.run_dir)
    assert rows[0]["step"] == 0
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 10, 20, 30]
    assert rows[-1]["loss/total"] < rows[1]["loss/total"]
    assert reward_model.metrics["eval/accuracy_before"] == 0.5, "a new head scores everything alike"
    assert rows[-1]["pairs/accuracy"] > 0.6
    config = json.loads((reward_model.run_dir / "export" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]


def test_preference_training_raises_the_margin_over_the_reference(small_model: Path, tmp_path: Path) -> None:
    result = PreferenceRun(_pairs(PreferenceRunConfig, "preference", small_model, tmp_path, loss="dpo")).train()

    assert result.metrics["eval/margin_before"] == pytest.approx(0.0, abs=1e-5)
    rows = _metrics(result.run_dir)
    assert rows[-1]["pairs/margin"] > 0.05
    assert result.status == "done"


def test_a_run_on_pairs_that_is_resumed_makes_the_same_steps_again(small_model: Path, tmp_path: Path) -> None:
    def config(**changes: Any) -> PreferenceRunConfig:
        found = _pairs(PreferenceRunConfig, "preference", small_model, tmp_path, num_steps=4)
        assert isinstance(found, PreferenceRunConfig)
        return found.model_copy(update={"checkpoint": CheckpointConfig(every=2, keep_last=3), **changes})

    whole = PreferenceRun(config()).train()
    weights = (whole.run_dir / "export" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"training\.optimizer\.lr"):
        PreferenceRun(config(training=parse_section(TrainingConfig, {"optimizer": {"lr": 1.0}})), resume="auto").train()
    shorter = _pairs(PreferenceRunConfig, "preference", small_model, tmp_path, num_steps=3)
    with pytest.raises(CheckpointError, match=r"preference\.num_steps=3 asks"):
        PreferenceRun(shorter, resume="auto").train()

    resumed = PreferenceRun(config(), resume=whole.run_dir / "checkpoints" / "step_000002").train()

    steps = [(row["step"], row["loss/total"]) for row in _metrics(whole.run_dir) if "loss/total" in row]
    assert [step for step, _ in steps] == [1, 2, 3, 4, 3, 4]
    assert steps[4:] == steps[2:4], "the same pairs, weights, moments and rates as in the run that was not cut"
    assert (whole.run_dir / "export" / "model.safetensors").read_bytes() == weights
    names = ("eval/accuracy_before", "eval/margin_before", "loss/first", "eval/margin")
    assert [resumed.metrics[name] for name in names] == [whole.metrics[name] for name in names]


def test_a_dataset_without_worse_answers_is_refused_before_anything_starts(small_model: Path, tmp_path: Path) -> None:
    config = _pairs(PreferenceRunConfig, "preference", small_model, tmp_path, rejected_field="worse")

    with pytest.raises(DatasetError, match="no text in field 'worse'"):
        PreferenceRun(config).train()
    assert not (tmp_path / "preference").exists()


def test_a_run_with_a_critic_resumes_where_it_was(small_model: Path, tmp_path: Path) -> None:
    algorithm = {"preset": "ppo", "critic": {"lr": 0.01, "warmup_steps": 1}}
    driver = {"groups_per_step": 4, "num_steps": 2, "max_staleness": 1}
    Run(_rl(small_model, tmp_path, algorithm=algorithm, driver=driver)).train()

    result = Run(
        _rl(small_model, tmp_path, algorithm=algorithm, driver={**driver, "num_steps": 4}), resume="auto"
    ).train()

    rows = _steps(result.run_dir)
    assert result.steps == 4
    assert "train/grad_norm" not in rows[0], "the first step is the critic's alone"
    assert all("critic/explained_variance" in row for row in rows)
    assert rows[-1]["train/version"] == 4


def test_a_reward_model_scores_the_completions_of_a_run(small_model: Path, reward_model: Any, tmp_path: Path) -> None:
    scorer = {"type": "reward_model", "path": str(reward_model.run_dir / "export"), "prompt_format": "text", "cpus": 0}
    terms = [
        {"name": "score", "reward": scorer},
        {"name": "match", "weight": 0.5, "reward": {"type": "exact_match"}},
    ]

    result = Run(_rl(small_model, tmp_path, reward={"type": "weighted_sum", "terms": terms})).train()

    rows = _steps(result.run_dir)
    assert result.status == "done"
    assert all(row["rollout/failed_samples"] == 0 for row in rows)
    assert any(row["reward/score"] != 0 for row in rows)
    assert all(row["reward/std"] > 0 for row in rows)


@pytest.mark.chaos
def test_a_reward_model_that_is_killed_comes_back_and_no_sample_is_lost(
    small_model: Path, reward_model: Any, tmp_path: Path
) -> None:
    scorer = {"type": "reward_model", "path": str(reward_model.run_dir / "export"), "prompt_format": "text", "cpus": 0}
    driver = {"groups_per_step": 4, "num_steps": 8, "max_staleness": 1}
    handle = Run(_rl(small_model, tmp_path, reward=scorer, driver=driver)).start()
    killed: list[int] = []

    def kill() -> None:
        # By the title of the process: the list of actors is a service of the dashboard, which tests go without.
        for process in psutil.Process().children(recursive=True):
            if " ".join(process.cmdline()).startswith("ray::FrozenModelActor"):
                process.kill()
                killed.append(process.pid)

    wake = threading.Event()
    while handle.status().get("step", 0) < 2:
        assert not wake.wait(0.1)
    kill()
    result = handle.wait()

    assert len(killed) == 1
    assert result.status == "done"
    assert all(row["rollout/failed_samples"] == 0 for row in _steps(result.run_dir))


def test_a_student_moves_towards_its_teacher(small_model: Path, tmp_path: Path) -> None:
    from rayrl.models.tiny import create_tiny_model

    teacher = create_tiny_model(
        tmp_path / "teacher", alphabet="0123456789+=", hidden_size=32, num_layers=1, num_heads=2, seed=7
    )
    config = _rl(
        small_model,
        tmp_path,
        algorithm={"preset": "distillation"},
        teacher={"path": str(teacher), "cpus": 0},
        driver={"groups_per_step": 8, "num_steps": 25, "max_staleness": 0},
        training={"optimizer": {"lr": 3e-3}},
    )

    result = Run(config).train()

    gaps = [row["distillation/reverse_kl"] for row in _steps(result.run_dir)]
    assert all(gap > -0.05 for gap in gaps)
    assert sum(gaps[-5:]) < 0.7 * sum(gaps[:5])


def test_a_policy_without_a_scalar_head_is_no_reward_model(small_model: Path, tmp_path: Path) -> None:
    reward = {"type": "reward_model", "path": str(small_model), "prompt_format": "text", "cpus": 0}

    with pytest.raises(ModelError, match="no scalar head"):
        Run(_rl(small_model, tmp_path, reward=reward)).train()


def test_distillation_without_a_teacher_is_refused(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="distillation needs a teacher"):
        _rl(small_model, tmp_path, algorithm={"preset": "distillation"})
    assert ray.is_initialized()
