"""What `rayrl check` finds on disk, `train` would refuse: exit code 2, the value and the fix, nothing written."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from rayrl.cli.main import main
from rayrl.tracking.run_folder import RunFolder

CONFIG = """
run: {name: small, output_root: out}
model: {path: model, max_context: 24}
dataset: {type: jsonl, path: sums.jsonl}
reward: {type: exact_match}
rollout:
  workflow: {type: single_turn, prompt_format: text}
  group_size: 4
  sampling: {max_new_tokens: 8}
driver: {groups_per_step: 2, num_steps: 3}
training: {optimizer: {lr: 1e-5}}
inference: {engine: {type: transformers}}
"""
SFT_CONFIG = """
run: {name: warm, output_root: out}
model: {path: model, max_context: 24}
dataset: {type: jsonl, path: sums.jsonl}
sft: {num_steps: 1, batch_size: 1, prompt_format: text}
training: {optimizer: {lr: 1e-5}}
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder without a chat template."""
    from rayrl.models.tiny import create_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    return create_tiny_model(folder, alphabet="0123456789+=", hidden_size=16, num_layers=1, num_heads=2)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with model, data and a config that fits them."""
    shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copytree(tiny_model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "1+2=", "answer": "3"}) + "\n", encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1+" * 9 + "1=", "answer": "10"}), encoding="utf-8")
    (tmp_path / "blank.jsonl").write_text(json.dumps({"prompt": "", "answer": "3"}), encoding="utf-8")
    (tmp_path / "sft.yaml").write_text(SFT_CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exit_code(*arguments: str) -> object:
    """Run a command in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_plan_and_files_are_printed_when_all_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = exit_code("check", "run.yaml")

    out = capsys.readouterr().out
    assert code == 0
    assert [title for title in ("batch:", "algorithm:", "placement:", "files:") if title not in out] == []
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.path=nowhere"], ["nowhere"]),
        (["model.path=bare"], ["'bare' has no weights"]),
        (["rollout.workflow.prompt_format=chat"], ["'model' has no chat template", "prompt_format: text"]),
        (["dataset.path=empty.jsonl"], ["empty"]),
        (["dataset.path=missing.jsonl"], ["missing.jsonl"]),
        (["dataset.path=long.jsonl"], ["20", "8", "24"]),
        (["dataset.answer_field=solution"], ["solution"]),
        (["reward={type: function, path: 'no_such_module:score'}"], ["no_such_module"]),
        (["reward={type: function, path: 'json:score'}"], ["score"]),
        (["rollout.workflow={type: custom, path: 'json:Workflow'}"], ["Workflow"]),
        (["dataset.path=blank.jsonl"], ["blank/0/0", "no tokens", "dataset.prompt_field"]),
        (["run.output_root=sums.jsonl"], ["sums.jsonl", "is a file"]),
    ],
    ids=lambda value: str(value[0])[:40],
)
def test_check_refuses_when_something_on_disk_does_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: list[str]
) -> None:
    before = sorted(folder.rglob("*"))

    code = exit_code("check", "run.yaml", *overrides)

    stderr = capsys.readouterr().err
    assert code == 2, stderr
    assert stderr.startswith("error: ")
    assert "Traceback" not in stderr
    assert [part for part in said if part not in stderr] == []
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("dataset.path=blank.jsonl", ["blank/0/0", "no tokens"]),
        ("dataset.answer_field=null", ["no answer", "dataset.answer_field"]),
        ("model.max_context=5", ["4 tokens", "2 new ones", "context holds 5"]),
    ],
)
def test_check_refuses_when_an_example_cannot_be_learned(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, said: list[str]
) -> None:
    assert exit_code("check", "sft.yaml") == 0

    code = exit_code("check", "sft.yaml", override)

    stderr = capsys.readouterr().err
    assert code == 2, stderr
    assert [part for part in said if part not in stderr] == []


VLLM = "inference.engine={type: vllm}"


def no_vllm(name: str) -> None:
    assert name == "vllm"


@pytest.mark.parametrize("command", ["check", "train", "eval"])
def test_run_is_refused_and_leaves_no_folder_when_local_engines_need_vllm_that_is_not_installed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("rayrl.infra.cluster.would_join", lambda: False)
    monkeypatch.setattr("rayrl.inference.vllm_api.find_spec", no_vllm)
    held_out = "evaluation={dataset: {type: jsonl, path: sums.jsonl}, sampling: {max_new_tokens: 8}}"

    code = exit_code(command, "run.yaml", VLLM, held_out)

    stderr = capsys.readouterr().err
    assert code == 2, stderr
    assert "vLLM is not installed in this environment; install it with `pip install 'rayrl[vllm]'`" in stderr
    assert not (folder / "out").exists()


def test_missing_vllm_is_a_note_when_a_cluster_is_joined_whose_nodes_may_have_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrl.infra.cluster.would_join", lambda: True)
    monkeypatch.setattr("rayrl.inference.vllm_api.find_spec", no_vllm)

    assert exit_code("check", "run.yaml", VLLM) == 0
    assert "vLLM is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("version", "code"), [("0.31.2", 2), ("0.32.1+cpu", 0)])
def test_version_of_vllm_is_compared_when_it_is_installed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, version: str, code: int
) -> None:
    monkeypatch.setattr("rayrl.infra.cluster.would_join", lambda: False)
    monkeypatch.setattr("rayrl.inference.vllm_api.find_spec", lambda name: object())
    monkeypatch.setattr("rayrl.inference.vllm_api.metadata.version", lambda name: version)

    assert exit_code("check", "run.yaml", VLLM) == code
    assert code == 0 or "vLLM 0.31.2 is installed; rayrl supports >=0.32,<0.33" in capsys.readouterr().err


@pytest.mark.parametrize("config", ["run.yaml", "sft.yaml"])
def test_check_refuses_as_train_does_when_the_output_folder_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    (folder / "out").mkdir()
    monkeypatch.setattr("os.access", lambda place, mode: Path(place) != folder / "out")

    code = exit_code("check", config)

    stderr = capsys.readouterr().err
    assert code == 2, stderr
    assert f"cannot create run folder {folder / 'out'}/" in stderr
    assert ": Permission denied; change run.output_root" in stderr


def test_check_names_the_run_that_is_there_already(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.create(folder / "out" / "small", "a: 1\n", "d", ["rayrl"], resume=False).close()

    assert exit_code("check", "run.yaml") == 0
    assert "holds a run that was interrupted while it started, which `--resume auto`" in capsys.readouterr().out


@pytest.mark.parametrize(("joins", "says_so"), [(False, True), (True, False)])
def test_note_says_so_when_a_local_ray_must_promise_more_cpus_than_there_are(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    joins: bool,
    says_so: bool,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("rayrl.infra.cluster.would_join", lambda: joins)

    assert exit_code("check", "run.yaml", "inference.num_engines=9") == 0
    assert ("logical CPUs on the 4 cores of this machine" in capsys.readouterr().out) is says_so


def test_function_of_the_working_directory_is_found_behind_what_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "my_own_reward.py").write_text("def score(prompt, completion):\n    return 1.0\n", encoding="utf-8")
    (folder / "yaml.py").write_text("raise RuntimeError('this file hides the library')\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(folder))])

    code = exit_code("check", "run.yaml", "reward={type: function, path: 'my_own_reward:score'}")

    assert code == 0
    assert sys.path[-1] == str(folder)


def test_tiny_model_is_kept_when_its_folder_exists(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (folder / "model" / "config.json").read_bytes()

    code = exit_code("models", "create-tiny", "model")

    assert code == 2
    assert "--force" in capsys.readouterr().err
    assert (folder / "model" / "config.json").read_bytes() == config


def test_import_refuses_when_the_source_is_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = exit_code("models", "import", "missing.gguf")

    assert code == 2
    assert "missing.gguf" in capsys.readouterr().err
    assert list(folder.glob("models/*")) == []
