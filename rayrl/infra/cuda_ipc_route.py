"""Weights within one GPU: the engine maps the trainer's memory, by a CUDA IPC handle. Written, not run on a GPU yet.

Each training rank holds all weights in one buffer on its GPU from `send` to `release`; the engine beside it on the same
GPU, found by the GPU's UUID, sees that very buffer. Allocators with `expandable_segments` have no such handles.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rayrl.errors import ConfigError, TransferError
from rayrl.infra.bucket_stream import bucket_digest, tensors_of_stream
from rayrl.infra.buckets import plan_buckets, stream_offsets
from rayrl.infra.weight_manifest import WeightManifest, bytes_of, checked_tensors
from rayrl.infra.weight_route import Parcel, ReceivedWeights, SentWeights, digest_fault, parcel_for

_DEVICE_ARGUMENT = 6
"""Position of the device index among the arguments of `rebuild_cuda_tensor`."""


class CudaIpcRoute:
    """Implements `WeightRoute`. ConfigError in a process without a GPU."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "transfer.backend=cuda_ipc needs a GPU that training and engine share, and this process has none; set "
                "training.gpus_per_worker, inference.gpus_per_engine and placement.mode=colocated, or another backend"
            )
        self._stream: Tensor | None = None

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> SentWeights:
        """See `WeightRoute`."""
        offsets, num_bytes = stream_offsets(manifest.tensors)
        stream = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device="cuda")
        source = checked_tensors(manifest, tensors)
        for spec, offset, tensor in zip(manifest.tensors, offsets, source, strict=False):
            stream[offset : offset + spec.num_bytes].copy_(bytes_of(tensor))
        for _ in source:
            pass
        torch.cuda.synchronize()
        self._stream = stream
        rebuild, arguments = reduce_tensor(stream)
        if rebuild is not rebuild_cuda_tensor:
            raise TransferError("this build of torch shares GPU memory in another way; use another transfer.backend")
        digests = _digests(manifest, stream)
        parcel = Parcel.of(manifest, digests=digests, content=arguments, device=_gpu_uuid())
        return SentWeights(digests=digests, parcel=parcel)

    def receive(
        self,
        manifest: WeightManifest,
        parcels: Sequence[Parcel],
        timeout_s: float,
        memory: Tensor | None = None,
    ) -> ReceivedWeights:
        """See `WeightRoute`."""
        parcel = parcel_for(manifest, parcels, _gpu_uuid())
        arguments = list(parcel.content)
        # The same GPU may have another index in the process of the sender.
        arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
        stream: Tensor = rebuild_cuda_tensor(*arguments)
        arrived = _digests(manifest, stream)
        fault = digest_fault(parcel.digests, arrived)
        tensors = {} if fault is not None else tensors_of_stream(manifest, stream)
        return ReceivedWeights(tensors=tensors, digests=arrived, fault=fault)

    def release(self, version: int) -> None:
        """See `WeightRoute`."""
        self._stream = None
        torch.cuda.ipc_collect()

    def close(self) -> None:
        """See `WeightRoute`."""
        self._stream = None


def _digests(manifest: WeightManifest, stream: Tensor) -> tuple[str, ...]:
    buckets = plan_buckets(manifest.tensors, manifest.bucket_bytes)
    return tuple(bucket_digest(stream[bucket.start : bucket.start + bucket.num_bytes]) for bucket in buckets)


def _gpu_uuid() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
