"""Imports point one way, and each third-party library has one home. Function-level imports count."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

LAYERS = (
    ("utils",),
    ("errors",),
    ("types",),
    ("config",),
    ("tracking",),
    ("algorithms", "rewards", "datasets", "models", "checkpoint", "infra"),
    ("rollout", "training", "inference", "audit"),
    ("driver",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
ACTOR_SHELLS = ("rollout", "training", "inference")
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "wandb")


def imported_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and full dotted name of every import in a tree, `import_module("literal")` included."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            names += [(node.lineno, f"{prefix}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names += [
                (node.lineno, str(argument.value)) for argument in node.args if isinstance(argument, ast.Constant)
            ]
    return names


def layer_faults(package: str, tree: ast.AST) -> list[str]:
    """Return the imports of a package that do not lie below it."""
    faults = []
    for line, name in imported_names(tree):
        parts = name.split(".")
        if name.startswith("."):
            faults.append(f"line {line}: relative import {name}")
        elif parts[0] != "rayrl" or len(parts) == 1 or parts[1] not in RANK or parts[1] == package:
            continue
        elif RANK[parts[1]] >= RANK[package]:
            faults.append(f"line {line}: {package} imports {name}, which is not below it")
    return faults


def may_import(library: str, path: Path) -> bool:
    """Whether a file of the package is a home of a third-party library."""
    package = path.parts[1] if len(path.parts) > 2 else ""
    if library == "ray":
        shell = package in ACTOR_SHELLS and (path.name.endswith("_actor.py") or path.name == "worker.py")
        return package in ("infra", "driver", "cli") or shell
    if library == "datasets":
        return path == Path("rayrl/datasets/huggingface.py")
    homes = {"wandb": "tracking", "vllm": "inference", "deepspeed": "training"}
    return library not in homes or homes[library] == package


def test_every_package_has_a_layer_when_the_tree_is_listed(package_files: list[Any]) -> None:
    packages = {file.package for file in package_files if file.package}

    assert packages <= set(RANK), f"packages without a layer: {sorted(packages - set(RANK))}"


def test_imports_point_downwards_when_any_module_of_the_package_is_read(package_files: list[Any]) -> None:
    faults = [
        f"{file.path}: {fault}"
        for file in package_files
        if file.package in RANK
        for fault in layer_faults(file.package, file.tree)
    ]

    assert faults == []


def test_each_library_is_imported_at_its_home_when_any_module_is_read(package_files: list[Any]) -> None:
    faults = [
        f"{file.path}:{line}: {name}"
        for file in package_files
        for line, name in imported_names(file.tree)
        if not may_import(name.split(".")[0], file.path)
    ]

    assert faults == []


def test_lowest_layers_stay_light_when_their_imports_are_read(package_files: list[Any]) -> None:
    heavy = [
        f"{file.path}:{line}: {name}"
        for file in package_files
        for line, name in imported_names(file.tree)
        if file.package in ("utils", "errors", "types", "config") and name.split(".")[0] in HEAVY
    ]
    not_standard = [
        f"{file.path}:{line}: {name}"
        for file in package_files
        for line, name in imported_names(file.tree)
        if file.package in ("utils", "errors") and name.split(".")[0] not in {*sys.stdlib_module_names, "rayrl"}
    ]

    assert heavy == []
    assert not_standard == []


@pytest.mark.parametrize(
    ("package", "code", "num_faults"),
    [
        ("config", "from rayrl.errors import ConfigError", 0),
        ("config", "def f():\n    from rayrl.driver.run import Run", 1),
        ("rollout", "import rayrl.training.worker", 1),
        ("driver", "from rayrl import cli", 1),
        ("models", "from .folder import x", 1),
        ("driver", "import_module('rayrl.cli.main')", 1),
    ],
)
def test_layer_rule_sees_an_import_when_it_is_hidden(package: str, code: str, num_faults: int) -> None:
    assert len(layer_faults(package, ast.parse(code))) == num_faults


@pytest.mark.parametrize(
    ("library", "path", "allowed"),
    [
        ("ray", "rayrl/rollout/rollout_actor.py", True),
        ("ray", "rayrl/training/worker.py", True),
        ("ray", "rayrl/training/fsdp.py", False),
        ("ray", "rayrl/models/tiny.py", False),
        ("wandb", "rayrl/driver/run.py", False),
        ("vllm", "rayrl/inference/vllm_engine.py", True),
        ("deepspeed", "rayrl/inference/engine.py", False),
        ("datasets", "rayrl/datasets/jsonl.py", False),
        ("numpy", "rayrl/utils/logger.py", True),
    ],
)
def test_home_rule_names_the_home_when_a_library_is_imported(library: str, path: str, allowed: bool) -> None:
    assert may_import(library, Path(path)) is allowed
