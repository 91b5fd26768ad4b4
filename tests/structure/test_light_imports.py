"""Importing the package, its config or its command line loads nothing heavy; so `rayrl --help` answers at once."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "vllm", "deepspeed", "transformers", "wandb", "datasets", "accelerate"}
HEAVY_FOR_HELP = HEAVY | {"pyarrow", "numpy", "reasoning_gym", "math_verify", "safetensors"}


def loaded_after(code: str) -> set[str]:
    """Return the top-level modules that a new Python process has loaded after running the code."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module", ["rayrl", "rayrl.errors", "rayrl.config", "rayrl.config.run", "rayrl.types", "rayrl.cli.main"]
)
def test_nothing_heavy_is_loaded_when_a_light_module_is_imported(module: str) -> None:
    assert loaded_after(f"import {module}") & HEAVY == set()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["models", "--help"], ["--version"]])
def test_nothing_heavy_is_loaded_when_help_is_printed(arguments: list[str]) -> None:
    code = (
        "from rayrl.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code"
    )

    assert loaded_after(code) & HEAVY_FOR_HELP == set()


def test_heavy_module_is_seen_when_it_is_loaded() -> None:
    assert "numpy" in loaded_after("import numpy")
