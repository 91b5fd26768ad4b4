"""Weights through Ray's object store: tensors are copied into it once, and read where they lie by engines of that node.

    sender:    next tensors ─put─> object      one object is put while the tensors of the next one are digested
    receiver:  object ─> views of the store's memory ─digest─> tensors

An object holds whole tensors, up to a bucket's size together, or one that is larger. It lives as long as the sender,
the parcel or a staged tensor holds it: commit and discard free it.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from rayrl.errors import ActorError, TransferError
from rayrl.infra.bucket_stream import digests_of_tensors, tensor_of_bytes
from rayrl.infra.phase_times import PhaseTimes
from rayrl.infra.waiting import get_within
from rayrl.infra.weight_manifest import WeightManifest, bytes_of, checked_tensors
from rayrl.infra.weight_route import Parcel, ReceivedWeights, SentWeights, digest_fault, parcel_for


class ObjectStoreRoute:
    """Implements `WeightRoute`."""

    def __init__(self) -> None:
        self._held: dict[int, list[Any]] = {}

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> SentWeights:
        """See `WeightRoute`."""
        refs: list[Future[Any]] = []
        times = PhaseTimes()
        with ThreadPoolExecutor(1, thread_name_prefix="store") as pool:

            def stored() -> Iterator[Tensor]:
                """Yield the bytes of each tensor, and put them into the store meanwhile."""
                together: list[Any] = []
                size = 0
                for tensor in checked_tensors(manifest, tensors):
                    with times.of("gather"):
                        flat = bytes_of(tensor).cpu()
                    if together and size + flat.numel() > manifest.bucket_bytes:
                        put(together)
                        together, size = [], 0
                    together.append(flat.numpy())
                    size += flat.numel()
                    yield flat
                put(together)

            def put(arrays: list[Any]) -> None:
                with times.of("store"):
                    if refs:
                        # No more than what is put and what is being collected is held.
                        refs[-1].result()
                    refs.append(pool.submit(ray.put, arrays))

            try:
                digests = digests_of_tensors(manifest, stored(), times)
                with times.of("store"):
                    content = [ref.result() for ref in refs]
            except RayError as error:
                raise TransferError(
                    f"version {manifest.version} cannot be put into Ray's object store: {str(error).splitlines()[0]}; "
                    f"give the store more memory (ray start --object-store-memory), or set another transfer.backend"
                ) from error
        self._held[manifest.version] = content
        parcel = Parcel.of(manifest, digests=digests, content=tuple(content))
        return SentWeights(digests=digests, parcel=parcel, times=times.seconds)

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
        arrays: list[Any] = []
        times = PhaseTimes()
        deadline = time.monotonic() + timeout_s
        for ref in parcel.content:
            try:
                with times.of("fetch"):
                    left_s = max(0.0, deadline - time.monotonic())
                    arrays += get_within(ref, seconds=left_s, phase=phase, actor="the object store")
            except ActorError as error:
                raise TransferError(f"{phase}: its sender is gone, or the objects are: {error}") from error
        if [array.nbytes for array in arrays] != [spec.num_bytes for spec in manifest.tensors]:
            raise TransferError(f"{phase}: {len(arrays)} tensors arrived, and not those of the manifest")
        flat = [_view(array) for array in arrays]
        arrived = digests_of_tensors(manifest, flat, times)
        fault = digest_fault(parcel.digests, arrived)
        tensors = {spec.name: tensor_of_bytes(part, spec) for spec, part in zip(manifest.tensors, flat, strict=True)}
        return ReceivedWeights(
            tensors={} if fault is not None else tensors, digests=arrived, fault=fault, times=times.seconds
        )

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
