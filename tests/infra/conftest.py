"""Members of real gloo groups, in threads of one process: the groups are objects, so that this is enough for most."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from rayrl.infra.collective_group import CollectiveGroup, HostedRendezvous, host_rendezvous

_HOST = "127.0.0.1"


class RunMembers(Protocol):
    """Runs `work[i]` as rank i of a group, all at once."""

    def __call__(
        self,
        hosted: HostedRendezvous,
        work: Sequence[Callable[[CollectiveGroup], Any] | None],
        *,
        epochs: Sequence[int] | None = None,
        members: Sequence[Sequence[str]] | None = None,
        timeout_s: float = 30.0,
    ) -> list[Any]:
        """Return what each rank returned or raised; None in `work` is a member that never comes."""
        ...


@pytest.fixture
def hosted() -> Any:
    """A rendezvous on this machine."""
    rendezvous = host_rendezvous(_HOST, 30.0)
    yield rendezvous
    rendezvous.close()


@pytest.fixture
def run_members() -> RunMembers:
    """See `RunMembers`."""

    def run(hosted, work, *, epochs=None, members=None, timeout_s=30.0):
        names = ("train-0", *(f"inference-{index}" for index in range(len(work) - 1)))

        def one(rank: int) -> Any:
            group = CollectiveGroup.join(
                hosted.address,
                name="weights",
                epoch=epochs[rank] if epochs else 1,
                rank=rank,
                members=members[rank] if members else names,
                backend="gloo",
                timeout_s=timeout_s,
                hosted=hosted if rank == 0 else None,
            )
            try:
                return work[rank](group)
            finally:
                group.close()

        with ThreadPoolExecutor(len(work)) as pool:
            futures = [pool.submit(one, rank) for rank in range(len(work)) if work[rank] is not None]
            return [future.exception() or future.result() for future in futures]

    return run
