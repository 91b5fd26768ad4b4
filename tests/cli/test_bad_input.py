"""Bad input ends with exit code 2 and one readable block; nothing is started, nothing is written."""

from pathlib import Path

import pytest

from rayrl.cli.main import main

CONFIG = """
run: {name: small}
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
run: {name: small}
model: {path: models/small}
dataset: {type: arithmetic}
sft: {num_steps: 1, batch_size: 1}
training: {optimizer: {lr: 1e-5}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a good config of each kind."""
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "sft.yaml").write_text(SFT_CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exit_code(*arguments: str) -> object:
    """Run a command in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


@pytest.mark.parametrize("command", ["train", "eval", "check"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drivr.num_steps=3", "did you mean 'driver'?"),
        ("driver.num_steps=many", "driver.num_steps: got 'many'"),
        ("driver.minibatches=3", "is not divisible by driver.minibatches=3"),
        ("driver.num_steps", "not of the form section.key=value"),
    ],
)
def test_command_refuses_when_the_config_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, override: str, said: str
) -> None:
    code = exit_code(command, "run.yaml", override)

    stderr = capsys.readouterr().err
    assert code == 2
    assert stderr.startswith("error: ")
    assert said in stderr
    assert "Traceback" not in stderr
    assert {path.name for path in folder.iterdir()} == {"run.yaml", "sft.yaml"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "missing.yaml"], "cannot read config 'missing.yaml'"),
        (["sft", "run.yaml"], "sft: required, but not given"),
        (["train", "sft.yaml"], "it is a config of `rayrl sft`"),
        (["eval", "sft.yaml"], "it is a config of `rayrl sft`"),
        (["check", "sft.yaml", "sft.num_steps=x"], "sft.num_steps: got 'x'"),
    ],
)
def test_command_refuses_when_the_file_is_another(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code = exit_code(*arguments)

    assert code == 2
    assert said in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == {"run.yaml", "sft.yaml"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "run.yaml", "--resum", "auto"],
        ["models", "get"],
        ["--verison"],
        ["train", "--resume"],
    ],
)
def test_usage_is_explained_when_the_command_line_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code = exit_code(*arguments)

    assert code == 2
    assert "Error: " in capsys.readouterr().err
