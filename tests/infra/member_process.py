"""A member of a group in a process of its own, for tests: joins, takes part in one broadcast, and obeys `how`.

Usage: member_process.py PORT RANK SIZE HOW. HOW is `stay` (print what arrived) or `die` (be gone before the second
broadcast, without a word).
"""

import os
import sys

import torch

from rayrl.infra.collective_group import CollectiveGroup, RendezvousAddress


def main(port: int, rank: int, size: int, how: str) -> None:
    """Run the member."""
    torch.set_num_threads(1)
    group = CollectiveGroup.join(
        RendezvousAddress(host="127.0.0.1", port=port),
        name="weights",
        epoch=1,
        rank=rank,
        members=[f"member-{index}" for index in range(size)],
        backend="gloo",
        timeout_s=60.0,
    )
    tensor = torch.zeros(1000)
    group.broadcast(tensor, source=0)
    if how == "die":
        os._exit(3)
    sys.stdout.write(f"{tensor.sum().item():g}")
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
