"""Files and functions stay small enough to be read in one go."""

import ast
from statistics import median
from typing import Any

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_MEDIAN_LINES = 150
MAX_LONG_FILES = 8
LONG_FILE_LINES = 350


def num_lines(file: Any) -> int:
    """Lines of a source file."""
    return len(file.text.splitlines())


def test_no_file_is_too_long_when_the_tree_is_listed(source_files: list[Any]) -> None:
    too_long = {str(file.path): num_lines(file) for file in source_files if num_lines(file) > MAX_FILE_LINES}

    assert too_long == {}


def test_few_files_are_long_when_the_package_is_listed(package_files: list[Any]) -> None:
    long = [str(file.path) for file in package_files if num_lines(file) > LONG_FILE_LINES]

    assert len(long) <= MAX_LONG_FILES, long


def test_the_typical_file_is_short_when_the_package_is_listed(package_files: list[Any]) -> None:
    sizes = [num_lines(file) for file in package_files if file.path.name != "__init__.py"]

    assert median(sizes) <= MAX_MEDIAN_LINES


def test_no_function_is_too_long_when_the_tree_is_listed(source_files: list[Any]) -> None:
    too_long = {
        f"{file.path}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for file in source_files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    }

    assert too_long == {}


def test_packages_are_two_levels_deep_when_the_tree_is_listed(package_files: list[Any]) -> None:
    deep = [str(file.path) for file in package_files if len(file.path.parts) > 3]

    assert deep == []
