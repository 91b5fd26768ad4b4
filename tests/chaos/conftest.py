"""Makes the helpers of this folder importable, and a tiny model for its runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def chaos_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model small enough that a step takes a fraction of a second."""
    from rayrl.models.tiny import create_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    return create_tiny_model(
        folder, alphabet="0123456789+=", hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_context=32
    )
