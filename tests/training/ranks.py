"""Run a function on several ranks of a real gloo group; importable in the spawned processes."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run_on_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[Any]:
    """Return what `function(rank, world_size, *args)` returned on each rank."""
    store, results = folder / "store", folder / "results"
    results.mkdir()
    spawn(_enter, (function, world_size, str(store), str(results), args), nprocs=world_size)
    return [torch.load(results / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _enter(
    rank: int, function: Callable[..., Any], world_size: int, store: str, results: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    try:
        torch.save(function(rank, world_size, *args), Path(results) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
