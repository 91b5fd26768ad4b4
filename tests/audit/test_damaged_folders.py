"""Folders whose `run.json` or `config.yaml` is damaged, and folders of other kinds of runs."""

import time
from pathlib import Path

import pytest
from hand_built import begin, record_steps

from rayrl.audit.doctor import diagnose
from rayrl.audit.doctor_record import examine
from rayrl.audit.report import audit_run
from rayrl.cli.main import main
from rayrl.config.digest import digest_of
from rayrl.config.run import RunConfig
from rayrl.config.supervised import SFTRunConfig


@pytest.fixture
def run_dir(repo_root: Path, tmp_path: Path) -> Path:
    """A run with two steps."""
    path = begin(RunConfig.load(repo_root / "configs" / "quickstart_grpo.yaml", [f"run.output_root={tmp_path}"]))
    record_steps(path, 2)
    return path


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("run.json", lambda text: text[:100], "run.json cannot be used: "),
        ("run.json", lambda text: "[]", "it lacks the id of the run"),
        ("run.json", None, "it is missing"),
        ("config.yaml", lambda text: text[: text.index("rollout:") + 3], "config.yaml cannot be used: "),
        ("config.yaml", lambda text: text[: text.index("driver:") + 20], "it is not what the run wrote"),
        ("config.yaml", lambda text: "", "it holds no config"),
        ("config.yaml", lambda text: "a: [", "config.yaml cannot be used: "),
        ("config.yaml", lambda text: "\x00\x01", "config.yaml cannot be used: "),
        ("config.yaml", None, "No such file"),
    ],
)
def test_damaged_record_is_refuted_with_what_to_do(
    run_dir: Path, capsys: pytest.CaptureFixture[str], name: str, change, words: str
) -> None:
    path = run_dir / name
    if change is None:
        path.unlink()
    else:
        path.write_text(change(path.read_text()))

    with pytest.raises(SystemExit) as end:
        main(["audit", str(run_dir)])

    out = capsys.readouterr().out
    assert end.value.code == 1
    assert words in out and f"take {name} from a copy of the folder" in out
    (symptom,) = [item for item in diagnose(examine(run_dir, time.time())) if item.kind == "records"]
    assert words in symptom.evidence[0] and "from a copy" in symptom.setting
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(run_dir)])
    assert end.value.code == 1


def test_other_checks_are_made_when_only_the_id_is_lost(run_dir: Path) -> None:
    (run_dir / "run.json").write_text("{")

    report = audit_run(run_dir)

    assert report.run_id == ""
    assert len(report.findings) == 7 and report.numbers["steps"] == 2


def test_config_of_another_version_is_bad_input_and_not_damage(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "config.yaml"
    before = path.read_text()
    path.write_text(before + "later_section: {}\n")
    info = (run_dir / "run.json").read_text()
    (run_dir / "run.json").write_text(info.replace(digest_of(before), digest_of(path.read_text())))

    with pytest.raises(SystemExit) as end:
        main(["audit", str(run_dir)])

    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "later_section" in error and "read it with the rayrl that it was made with" in error


@pytest.mark.parametrize("command", ["audit", "doctor"])
def test_supervised_run_is_refused_with_its_kind_and_where_to_look(
    repo_root: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = begin(SFTRunConfig.load(repo_root / "configs" / "quickstart_sft.yaml", [f"run.output_root={tmp_path}"]))

    with pytest.raises(SystemExit) as end:
        main([command, str(path)])

    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "is the folder of a run of `rayrl sft`; only runs of `rayrl train`" in error
    assert "metrics.jsonl" in error and "logs/failure.txt" in error
