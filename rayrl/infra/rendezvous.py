"""Where the members of a collective group meet: a key-value store in the process of rank 0.

The store listens on a port that the kernel chooses and keeps it from then on; nobody picks a free port, releases it
and hopes that it is still free later.
"""

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in `__all__`

from rayrl.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousAddress:
    """Where a store listens.

    Example: `RendezvousAddress(host="10.0.0.4", port=40321)`.
    """

    host: str
    """IP address of rank 0's node, reachable by all members."""
    port: int
    """Port that the kernel gave."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class HostedRendezvous:
    """The store of a process that hosts it; lives until `close`."""

    def __init__(self, address: RendezvousAddress, store: TCPStore) -> None:
        self.address = address
        self._store: TCPStore | None = store

    @property
    def store(self) -> TCPStore:
        """The store; RuntimeError once it is closed."""
        if self._store is None:
            raise RuntimeError(f"the rendezvous at {self.address} is closed")
        return self._store

    def close(self) -> None:
        """Stop to listen, as soon as the groups of this process that use the store are closed as well."""
        self._store = None


def host_rendezvous(host: str, timeout_s: float) -> HostedRendezvous:
    """Open a store on a free port of this process.

    Args:
        host: IP address of this node under which the other members reach it, `127.0.0.1` within one machine.
        timeout_s: limit of one operation on the store.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return HostedRendezvous(RendezvousAddress(host=host, port=store.port), store)


def reach_rendezvous(address: RendezvousAddress, timeout_s: float) -> TCPStore:
    """Connect to a store of another process. DeadlineExceeded if it does not answer in time."""
    try:
        return TCPStore(
            address.host,
            address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"no rendezvous at {address} within {timeout_s:g} s; is rank 0 alive, and is its node reachable from here? "
            f"({str(error).splitlines()[0]})"
        ) from error
