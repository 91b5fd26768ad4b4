"""Run functions on several ranks of a real gloo group; importable in the spawned processes."""

import functools
import multiprocessing
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayrl.training import layout

_TIMEOUT_S = 600
"""Of one call, which may be a whole list of cases on a busy machine, and of the collectives in it."""


class RankPool:
    """Processes that joined one gloo group and run one function after another."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self._folder = folder
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what `function(rank, world_size, *args)` returned on each rank.

        If it fails on one, all processes end, as the others may wait for it for ever, and the next call has new ones.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        try:
            for rank, pipe in enumerate(self._pipes):
                if not pipe.poll(_TIMEOUT_S):
                    raise TimeoutError(f"rank {rank} of {self.world_size} does not answer")
                is_ok, value = pipe.recv()
                if not is_ok:
                    raise RuntimeError(f"rank {rank} of {self.world_size} failed:\n{value}")
                results.append(value)
        except BaseException:
            self.close()
            raise
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = str(self._folder / f"store-{uuid.uuid4().hex}")
        for rank in range(self.world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, there), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(here)


def run_on_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[Any]:
    """Return what `function(rank, world_size, *args)` returned on each rank of a group of its own."""
    pool = RankPool(world_size, folder)
    try:
        return pool.run(function, *args)
    finally:
        pool.close()


def _share_meshes() -> None:
    """Make one mesh for all engines of one shape in this process.

    A mesh is ten process groups, and each group of gloo has a thread that wakes up a hundred times a second until the
    process ends: after a hundred cases the machine would do little else.
    """
    layout.init_device_mesh = functools.cache(layout.init_device_mesh)  # type: ignore[attr-defined]


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    _share_meshes()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, world_size, *args)))
        except BaseException:  # noqa: BLE001 - the test that asked shows it
            pipe.send((False, traceback.format_exc()))
