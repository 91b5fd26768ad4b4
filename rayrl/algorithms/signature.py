"""Calling the functions of one table alike, although each takes only the arguments that its formula needs."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def select_arguments(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the available arguments that the function names.

    Raises:
        ValueError: an argument without default is not available or None; the message names function and argument.
    """
    chosen = {}
    for name, parameter in inspect.signature(function).parameters.items():
        needed = parameter.default is inspect.Parameter.empty
        if name in available and not (needed and available[name] is None):
            chosen[name] = available[name]
        elif needed:
            raise ValueError(f"{function.__name__}: needs {name!r}, which was not given; have {sorted(available)}")
    return chosen
