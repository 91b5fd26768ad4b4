"""Makes the helpers of this folder importable, and a model for its runs with vLLM."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with heads of 32, the smallest that vLLM has attention kernels for."""
    from small_runs import make_small_model

    folder = tmp_path_factory.mktemp("models") / "vllm"
    return make_small_model(folder, hidden_size=128, num_heads=4, intermediate_size=128, max_context=64)
