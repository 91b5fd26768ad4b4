"""Rules of the code that no linter knows: waits end, failures are seen, tests assert, nothing local is written down."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

BUILT_IN_MARKERS = {"parametrize", "skip", "skipif", "xfail", "usefixtures", "filterwarnings", "asyncio", "timeout"}
# Paths of one machine, addresses of one cluster, keys, and pointers to places that a reader cannot open.
NOT_IN_THE_REPOSITORY = {
    "absolute path of one machine": re.compile(r"(?<![\w.~-])/(?:home|root|work|Users|mnt)/\w"),
    "address of one cluster": re.compile(r"\b(?:https?|ray)://(?:localhost|\d{1,3}(?:\.\d{1,3}){3})"),
    "credential": re.compile(r"(?i)\b(?:api_key|token|password|secret)\s*[=:]\s*[\"'][A-Za-z0-9_-]{20,}[\"']"),
    "number of a task list": re.compile(r"(?i)\bissue #?\d"),
    "note to oneself": re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b"),
}
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".txt", ".sh", ""}


def text_files(root: Path) -> list[Path]:
    """Return the text files of the project, environments and outputs left out."""
    folders = ("rayrl", "tests", "jobs", "benchmarks", "configs", "docs", ".ci")
    files = [path for path in root.iterdir() if path.is_file() and path.name != ".git"]
    files += [path for folder in folders for path in (root / folder).rglob("*") if path.is_file()]
    return [path for path in files if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts]


def calls(tree: ast.AST, *names: str) -> list[ast.Call]:
    """Return the calls of functions with these dotted names."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]


def waits_without_timeout(tree: ast.AST) -> list[int]:
    """Return the lines of ray.get and ray.wait without a timeout, or with None as one."""
    lines = []
    for call in calls(tree, "ray.get", "ray.wait"):
        given = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
        if not given or (isinstance(given[0], ast.Constant) and given[0].value is None):
            lines.append(call.lineno)
    return lines


def swallowed_failures(tree: ast.AST) -> list[int]:
    """Return the lines of broad handlers that do nothing."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body)
    ]


def asserts(function: ast.AST) -> bool:
    """Whether a test function holds something that can fail it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr in ("raises", "warns")):
            return True
        if isinstance(node, ast.Call) and "assert" in ast.unparse(node.func).lower():
            return True
    return False


def test_every_wait_has_a_timeout_when_the_code_waits_for_ray(source_files: list[Any]) -> None:
    faults = [f"{file.path}:{line}" for file in source_files for line in waits_without_timeout(file.tree)]

    assert faults == []


def test_no_failure_is_swallowed_when_a_handler_is_broad(source_files: list[Any]) -> None:
    faults = [f"{file.path}:{line}" for file in source_files for line in swallowed_failures(file.tree)]

    assert faults == []


def test_no_attribute_is_guessed_when_the_package_reads_objects(package_files: list[Any]) -> None:
    faults = [
        f"{file.path}:{call.lineno}"
        for file in package_files
        for call in calls(file.tree, "getattr")
        if len(call.args) == 3
    ]

    assert faults == []


def test_every_module_says_what_it_is_when_it_is_opened(source_files: list[Any]) -> None:
    code = [file for file in source_files if file.top != "tests" and file.text.strip()]

    without = [str(file.path) for file in code if not ast.get_docstring(file.tree)]

    assert without == []


def test_every_test_asserts_something_when_the_suite_is_read(source_files: list[Any]) -> None:
    without = [
        f"{file.path}:{node.lineno} {node.name}"
        for file in source_files
        if file.top == "tests" and file.path.name.startswith("test_")
        for node in ast.walk(file.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if not asserts(node)
    ]

    assert without == []


def test_no_test_sleeps_when_the_suite_is_read(source_files: list[Any]) -> None:
    sleeping = [
        f"{file.path}:{call.lineno}"
        for file in source_files
        if file.top == "tests"
        for call in calls(file.tree, "time.sleep", "asyncio.sleep")
        if not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0)
    ]

    assert sleeping == []


def test_every_marker_is_registered_when_the_suite_is_read(source_files: list[Any], repo_root: Path) -> None:
    settings = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))
    registered = {line.split(":")[0] for line in settings["tool"]["pytest"]["ini_options"]["markers"]}

    unknown = {
        f"{file.path}:{node.lineno} {node.attr}"
        for file in source_files
        if file.top == "tests"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
        if node.attr not in registered | BUILT_IN_MARKERS
    }

    assert unknown == set()


@pytest.mark.parametrize("what", NOT_IN_THE_REPOSITORY)
def test_nothing_of_one_machine_is_written_down_when_any_file_is_read(what: str, repo_root: Path) -> None:
    pattern = NOT_IN_THE_REPOSITORY[what]

    found = [
        f"{path.relative_to(repo_root)}:{number}: {line.strip()[:80]}"
        for path in text_files(repo_root)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]

    assert found == []


@pytest.mark.parametrize(
    ("code", "num_faults"),
    [("ray.get(x)", 1), ("ray.wait([x], timeout=None)", 1), ("ray.get(x, timeout=3)", 0), ("store.get(x)", 0)],
)
def test_wait_rule_sees_a_wait_when_it_has_no_deadline(code: str, num_faults: int) -> None:
    assert len(waits_without_timeout(ast.parse(code))) == num_faults


def test_assertion_rule_sees_a_test_when_it_only_calls() -> None:
    assert not asserts(ast.parse("def test_x():\n    run()"))
    assert asserts(ast.parse("def test_x():\n    with pytest.raises(ValueError):\n        run()"))
