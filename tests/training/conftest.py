"""Tiny random models and ragged batches for the tests of training."""

import sys
from pathlib import Path

import pytest

# Spawned processes import the modules of this folder by name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with tied embeddings and grouped key heads."""
    from samples import write_llama

    return write_llama(tmp_path_factory.mktemp("llama"), tied=True)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own."""
    from samples import write_llama

    return write_llama(tmp_path_factory.mktemp("untied"), tied=False)
