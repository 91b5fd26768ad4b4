"""Tiny random models and ragged batches for the tests of training."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Spawned processes import the modules of this folder by name.
sys.path.insert(0, str(Path(__file__).parent))


if TYPE_CHECKING:
    from ranks import RankPool


@pytest.fixture(scope="session")
def rank_pools(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Mapping[int, RankPool]]":
    """Process groups by size, started when they are first used and kept for all tests."""
    from ranks import RankPool

    folder = tmp_path_factory.mktemp("ranks")
    pools = {world_size: RankPool(world_size, folder) for world_size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


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
