"""Weights through Ray's object store: one object per bucket, of one node or fetched from another.

    sender:    next tensor ─pack─> bucket ─put─> object      bucket i + 1 is packed while bucket i is put and digested
    receiver:  object ─> views of the store's memory         bucket i is digested while bucket i + 1 is fetched

An object lives as long as the sender, the parcel or a staged tensor holds it: commit and discard free it.
"""

import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import torch
from torch import Tensor

from rayrl.errors import ActorError, TransferError
from rayrl.infra.bucket_stream import bucket_digest, pack_buckets, packing_buffers, tensors_of_buckets
from rayrl.infra.buckets import plan_buckets
from rayrl.infra.waiting import get_within
from rayrl.infra.weight_manifest import WeightManifest, checked_tensors
from rayrl.infra.weight_route import Parcel, ReceivedWeights, SentWeights, digest_fault, parcel_for


class ObjectStoreRoute:
    """Implements `WeightRoute`."""

    def __init__(self) -> None:
        self._held: dict[int, list[Any]] = {}

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> SentWeights:
        """See `WeightRoute`."""
        buckets = plan_buckets(manifest.tensors, manifest.bucket_bytes)
        refs: list[Future[Any]] = []
        digests: list[Future[str]] = []
        with ThreadPoolExecutor(2, thread_name_prefix="store") as pool:
            buffers = packing_buffers(buckets, torch.device("cpu"))
            for packed in pack_buckets(buckets, checked_tensors(manifest, tensors), buffers):
                if refs:
                    # After this the other buffer is free: the one that is packed next.
                    refs[-1].result()
                    digests[-1].result()
                refs.append(pool.submit(ray.put, packed.numpy()))
                digests.append(pool.submit(bucket_digest, packed))
            content = self._held[manifest.version] = [ref.result() for ref in refs]
            sent = tuple(digest.result() for digest in digests)
        parcel = Parcel.of(manifest, digests=sent, content=tuple(content))
        return SentWeights(digests=sent, parcel=parcel)

    def receive(
        self,
        manifest: WeightManifest,
        parcels: Sequence[Parcel],
        timeout_s: float,
        memory: Tensor | None = None,
    ) -> ReceivedWeights:
        """See `WeightRoute`."""
        parcel = parcel_for(manifest, parcels)
        phase = f"fetching version {manifest.version} from the object store"
        parts: list[Tensor] = []
        digests: list[Future[str]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as hasher:
            for ref in parcel.content:
                try:
                    array = get_within(ref, seconds=timeout_s, phase=phase, actor="the object store")
                except ActorError as error:
                    raise TransferError(f"{phase}: its sender is gone, or the objects are: {error}") from error
                parts.append(_view(array))
                digests.append(hasher.submit(bucket_digest, parts[-1]))
            arrived = tuple(digest.result() for digest in digests)
        fault = digest_fault(parcel.digests, arrived)
        if fault is None and len(parts) != len(plan_buckets(manifest.tensors, manifest.bucket_bytes)):
            fault = f"{len(parts)} buckets arrived, the manifest has more or fewer"
        tensors = {} if fault is not None else tensors_of_buckets(manifest, parts)
        return ReceivedWeights(tensors=tensors, digests=arrived, fault=fault)

    def release(self, version: int) -> None:
        """See `WeightRoute`."""
        self._held.pop(version, None)

    def close(self) -> None:
        """See `WeightRoute`."""
        self._held.clear()


def _view(array: Any) -> Tensor:
    with warnings.catch_warnings():
        # The store's memory cannot be written to; nobody writes to staged tensors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
