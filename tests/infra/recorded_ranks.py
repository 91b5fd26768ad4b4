"""One rank of the tests of recorded groups: goes wrong on purpose in group after group, prints what it was told."""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from rayrl.errors import CollectiveError
from rayrl.infra.collective_recorder import CollectiveRecorder, CollectiveRing, SideChannel
from rayrl.infra.recorded_process_group import install

WORLD = 3


def good_then_skip(rank, group):
    dist.all_reduce(torch.ones(2), group=group)
    if rank != 2:
        dist.all_reduce(torch.ones(4), group=group)


def reorder(rank, group):
    first, second = (dist.all_reduce, dist.broadcast) if rank != 1 else (dist.broadcast, dist.all_reduce)
    for call in (first, second):
        call(torch.ones(2), **({"src": 0} if call is dist.broadcast else {}), group=group)


def other_shape(rank, group):
    dist.all_reduce(torch.ones(5 if rank == 1 else 4), group=group)


def other_dtype(rank, group):
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 2 else torch.float32), group=group)


def other_reduction(rank, group):
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM, group=group)


def all_alike(rank, group):
    shard, whole = torch.full((2,), float(rank)), torch.zeros(2 * WORLD)
    dist.all_gather_into_tensor(whole, shard, group=group)
    assert whole.tolist() == [0, 0, 1, 1, 2, 2]
    dist.reduce_scatter_tensor(shard, whole, group=group)
    dist.barrier(group=group)
    objects = [None] * WORLD
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": other} for other in range(WORLD)]


SCENARIOS = [all_alike, good_then_skip, reorder, other_shape, other_dtype, other_reduction]


def main(rank: int, port: int, folder: str, mode: str) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, WORLD, is_master=rank == 0, timeout=timedelta(seconds=60))
    channel = SideChannel(store=PrefixStore("collectives", store), timeout_s=3.0) if mode == "check" else None
    from pathlib import Path

    recorder = CollectiveRecorder(CollectiveRing(Path(folder) / f"train-{rank}.ring"), channel)
    backend = install(recorder, "cpu", "train-{}".format)
    timeout = timedelta(seconds=60 if mode == "check" else 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    told = {}
    for scenario in SCENARIOS if mode == "check" else [good_then_skip]:
        group = dist.new_group(range(WORLD), timeout=timeout)
        try:
            scenario(rank, group)
            told[scenario.__name__] = None
        except CollectiveError as error:
            told[scenario.__name__] = str(error)
        except RuntimeError as error:
            told[scenario.__name__] = f"gloo: {error}"
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    # All stay until all are done: the store lives in rank 0.
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{other}" for other in range(WORLD)])
    if rank == 0:
        store.wait(["left/1", "left/2"], timedelta(seconds=20))
    else:
        store.set(f"left/{rank}", "1")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
