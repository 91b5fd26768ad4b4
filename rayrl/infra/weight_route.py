"""The ways that a weight version can take from the trainer to the engines, behind one interface.

    collective   send and receive run at the same time over a group that all joined before       gloo, nccl
    stored       send leaves everything somewhere and returns a parcel; receive takes the parcel  object_store, disk,
                                                                                                  cuda_ipc

Manifest, buckets and digests are the same on every route; so is what the driver does with them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Protocol

from torch import Tensor

from rayrl.errors import TransferError
from rayrl.infra.bucket_stream import copy_to_stream
from rayrl.infra.buckets import stream_offsets
from rayrl.infra.collective_group import CollectiveGroup
from rayrl.infra.phase_times import PhaseTimes
from rayrl.infra.weight_manifest import WeightManifest
from rayrl.infra.weight_transfer import receive_weights, send_weights

RouteName = Literal["gloo", "nccl", "object_store", "disk", "cuda_ipc"]


class RouteKind(Enum):
    """How send and receive follow each other."""

    COLLECTIVE = "both sides move each bucket together, over a group that they joined before"
    STORED = "the sender leaves everything, then each receiver takes it"


def route_kind(name: RouteName) -> RouteKind:
    """Return the kind of a route."""
    return RouteKind.COLLECTIVE if name in ("gloo", "nccl") else RouteKind.STORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What a stored route hands from `send` to `receive`.

    Example: `Parcel(version=3, fingerprint="version 3, ...", digests=("9f3c",), device="", content="/runs/a/weights")`.
    """

    version: int
    fingerprint: str
    """Of the manifest that was sent."""
    digests: tuple[str, ...]
    """Of each bucket, as the sender had it."""
    device: str
    """UUID of the GPU whose processes can take it; empty if all can."""
    content: Any
    """Where it is; the route knows how to read it."""

    @classmethod
    def of(cls, manifest: WeightManifest, *, digests: tuple[str, ...], content: Any, device: str = "") -> "Parcel":
        """Return the parcel of the version of a manifest."""
        return cls(
            version=manifest.version,
            fingerprint=manifest.fingerprint(),
            digests=digests,
            device=device,
            content=content,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """What the sender did.

    Example: `SentWeights(digests=("9f3c", "02aa"), parcel=None)`.
    """

    digests: tuple[str, ...]
    """Of each bucket."""
    parcel: Parcel | None
    """For the receivers; None on collective routes."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what they were spent on; some pass at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedWeights:
    """What arrived at a receiver."""

    tensors: dict[str, Tensor]
    """By name; not to be written to."""
    digests: tuple[str, ...]
    """Of each bucket, of the bytes that arrived."""
    fault: str | None = None
    """Why these must not be used; None if no difference from what was sent is known here."""
    times: Mapping[str, float] = field(default_factory=dict)
    """As `SentWeights.times`."""


class WeightRoute(Protocol):
    """One side of a route. All calls block; one at a time."""

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> SentWeights:
        """Send the tensors of the manifest, drawn one by one. TransferError if they are others."""
        ...

    def receive(
        self,
        manifest: WeightManifest,
        parcels: Sequence[Parcel],
        timeout_s: float,
        memory: Tensor | None = None,
    ) -> ReceivedWeights:
        """Return the version of the manifest; the weights in use are not touched.

        `memory`, if it is given and large enough, may be where the tensors are.

        Raises:
            TransferError: no parcel is for this receiver, or it is of another version or gone.
            DeadlineExceeded: it did not come in time.
        """
        ...

    def release(self, version: int) -> None:
        """Free what was kept for receivers of this version; without it nothing happens. Called on the sender."""
        ...

    def close(self) -> None:
        """Free everything. Calling it again does nothing."""
        ...


class CollectiveRoute:
    """Broadcasts of rank 0 over a group."""

    def __init__(self, group: CollectiveGroup) -> None:
        self._group = group

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> SentWeights:
        """See `WeightRoute`."""
        times = PhaseTimes()
        digests = send_weights(self._group, manifest, tensors, times=times)
        return SentWeights(digests=digests, parcel=None, times=times.seconds)

    def receive(
        self,
        manifest: WeightManifest,
        parcels: Sequence[Parcel],
        timeout_s: float,
        memory: Tensor | None = None,
    ) -> ReceivedWeights:
        """See `WeightRoute`; the limit is that of the group."""
        times = PhaseTimes()
        tensors, digests = receive_weights(self._group, manifest, memory, times=times)
        return ReceivedWeights(tensors=tensors, digests=digests, times=times.seconds)

    def release(self, version: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def staged_in(received: ReceivedWeights, manifest: WeightManifest, memory: Tensor | None) -> ReceivedWeights:
    """Return what arrived as views of `memory`, copied there where it is elsewhere on the same device."""
    _, num_bytes = stream_offsets(manifest.tensors)
    if received.fault is not None or memory is None or memory.numel() < num_bytes:
        return received
    if any(tensor.device != memory.device for tensor in received.tensors.values()):
        return received
    times = PhaseTimes()
    with times.of("copy"):
        tensors = copy_to_stream(manifest, received.tensors, memory[:num_bytes])
    return replace(received, tensors=tensors, times={**received.times, **times.seconds})


def parcel_for(manifest: WeightManifest, parcels: Sequence[Parcel], device: str = "") -> Parcel:
    """Return the parcel of a receiver on `device`. TransferError if there is none, or it is of another manifest."""
    mine = [parcel for parcel in parcels if parcel.device in ("", device)]
    if not mine:
        held = ", ".join(sorted(parcel.device for parcel in parcels)) or "none"
        raise TransferError(
            f"weights of version {manifest.version}: no parcel for a receiver on {device or 'this node'}; "
            f"there are parcels for: {held}"
        )
    parcel = mine[0]
    if parcel.fingerprint != manifest.fingerprint():
        raise TransferError(
            f"weights of version {manifest.version}: the parcel holds {parcel.fingerprint}, prepared was "
            f"{manifest.fingerprint()}"
        )
    return parcel


def digest_fault(sent: Sequence[str], arrived: Sequence[str]) -> str | None:
    """Return the first bucket that differs, or None."""
    if len(sent) != len(arrived):
        return f"{len(arrived)} buckets arrived, {len(sent)} were sent"
    for index, (theirs, mine) in enumerate(zip(sent, arrived, strict=True)):
        if theirs != mine:
            return f"bucket {index} arrived with digest {mine}; sent was {theirs}"
    return None
