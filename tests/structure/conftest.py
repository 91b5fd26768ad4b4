"""The files of the project, read and parsed once for all structure tests."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

CODE_FOLDERS = ("rayrl", "tests", "jobs", "benchmarks")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A Python file: its path from the root, its text, its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def top(self) -> str:
        """First folder of the path."""
        return self.path.parts[0]

    @property
    def package(self) -> str:
        """Package or module right below rayrl; empty outside and for rayrl/__init__.py."""
        name = self.path.parts[1].removesuffix(".py") if self.top == "rayrl" else ""
        return "" if name == "__init__" else name


@pytest.fixture(scope="session")
def source_files(repo_root: Path) -> list[SourceFile]:
    """Every Python file of the project."""
    files = []
    for folder in CODE_FOLDERS:
        for path in sorted((repo_root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            files.append(SourceFile(path=path.relative_to(repo_root), text=text, tree=ast.parse(text)))
    return files


@pytest.fixture(scope="session")
def package_files(source_files: list[SourceFile]) -> list[SourceFile]:
    """The files of the rayrl package."""
    return [file for file in source_files if file.top == "rayrl"]
