"""A tiny model folder, made once for the tests of this folder."""

from pathlib import Path

import pytest

from rayrl.models.tiny import create_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return create_tiny_model(
        folder,
        alphabet="0123456789+=",
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        max_context=24,
        seed=3,
    )
