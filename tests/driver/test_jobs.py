"""The scripts in `jobs/` against the real driver."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_driver_script_trains_through_the_public_api_and_prints_the_result(
    repo_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rayrl.models.tiny import create_tiny_model

    model = create_tiny_model(tmp_path / "model", alphabet="0123456789+=", hidden_size=32, num_layers=1, num_heads=2)
    config = yaml.safe_load((repo_root / "configs" / "quickstart_grpo.yaml").read_text())
    config["tracking"] = {"sinks": ["jsonl"]}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    script = repo_root / "jobs" / "driver_script.py"

    load_script(script).main(
        str(path),
        [
            f"run.output_root={tmp_path}",
            f"model.path={model}",
            "driver.num_steps=2",
            "driver.groups_per_step=4",
            "evaluation.num_prompts=8",
        ],
    )

    output = capsys.readouterr().out
    assert f"done after 2 steps: {tmp_path / 'quickstart-grpo'}" in output
    assert "eval/accuracy = " in output
    assert len(script.read_text().splitlines()) <= 50
