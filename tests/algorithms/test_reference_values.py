"""Values computed by hand from the formulas, or given by the tests of public projects: `vectors.json`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rayrl.algorithms as algorithms

CASES = json.loads((Path(__file__).parent / "vectors.json").read_text())


def as_argument(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if name == "group_ids":
        return torch.tensor(value, dtype=torch.int64)
    return torch.tensor(value, dtype=torch.int64 if name.endswith("mask") else torch.float32)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_function_returns_the_reference_value(case: dict[str, Any]) -> None:
    function = getattr(algorithms, case["function"])
    kwargs = {name: as_argument(name, value) for name, value in case["kwargs"].items()}
    result = function(**kwargs)
    result = torch.stack(result) if isinstance(result, tuple) else result
    expected = torch.tensor(case["expected"], dtype=torch.float32)
    torch.testing.assert_close(result, expected, rtol=case["rtol"], atol=case["atol"])
