"""The logits of all tokens never exist: a bound on the peak that the direct way exceeds many times."""

import subprocess
import sys
from pathlib import Path

import pytest

_CASE = Path(__file__).parent / "memory_case.py"
_BOUND_BYTES = 800 * 2**20
"""Three buffers of 256 tokens over the vocabulary are 440 MiB; the rest is the allocator's."""


def _added_bytes(how: str, num_tokens: int) -> int:
    command = [sys.executable, str(_CASE), how, str(num_tokens)]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout)


@pytest.mark.slow
def test_logprobs_of_8192_tokens_over_150k_ids_need_less_than_the_direct_way_for_a_quarter_of_them() -> None:
    chunked = _added_bytes("chunked", 8192)
    whole = _added_bytes("whole", 2048)

    assert chunked < _BOUND_BYTES
    assert whole > 2 * _BOUND_BYTES
