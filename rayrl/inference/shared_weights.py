"""Weights handed to other processes of the same node through anonymous shared memory.

    owner: tensors --copy--> memory file --descriptor--> reader: views of the same pages

The file has no name: it is gone as soon as the last process that holds it is, however that one ended. It is kept from
one version to the next, so that its pages are made once.
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rayrl.errors import TransferError
from rayrl.inference.staging_memory import use_large_pages
from rayrl.infra.bucket_stream import bucket_digest
from rayrl.infra.buckets import DTYPE_BYTES, TensorSpec, stream_offsets
from rayrl.infra.weight_manifest import bytes_of, spec_of

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """Where the tensors of one version are; plain values, so that any serialiser will do.

    Example: `SharedWeights(file="/proc/812/fd/9", version=3, num_bytes=538090752, digest="9f3c", names=["a"],
    shapes=[[2, 3]], dtypes=["float32"])`.
    """

    file: str
    """Can be opened by processes of the same user and node while the owner lives."""
    version: int
    num_bytes: int
    digest: str
    """xxh3 of all bytes, of what was received and proven."""
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors without their values."""
        rows = zip(self.names, self.shapes, self.dtypes, strict=True)
        return tuple(TensorSpec(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in rows)


class SharedMemoryWriter:
    """Owns the memory file of one engine.

    A version that was staged in `reserve`'s memory, in the layout of `stream_offsets`, is written without a copy.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("rayrl-weights", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> SharedWeights:
        """Copy `tensors` into the memory, over those of the version before, and say where they are."""
        specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
        offsets, num_bytes = stream_offsets(specs)
        self.reserve(num_bytes)
        end = 0
        for spec, offset, tensor in zip(specs, offsets, tensors.values(), strict=True):
            # What lies between two tensors counts in the digest.
            self._bytes[end:offset].zero_()
            end = offset + spec.num_bytes
            if tensor.data_ptr() != self._bytes.data_ptr() + offset or not tensor.is_contiguous():
                self._bytes[offset:end].copy_(bytes_of(tensor))
        self._bytes[end:num_bytes].zero_()
        return SharedWeights(
            file=f"/proc/{os.getpid()}/fd/{self._descriptor}",
            version=version,
            num_bytes=num_bytes,
            digest=bucket_digest(self._bytes[:num_bytes]),
            names=[spec.name for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            dtypes=[spec.dtype for spec in specs],
        )

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least `num_bytes` of the memory, as uint8; it holds what the last call or `write` left there."""
        if num_bytes > self._bytes.numel():
            os.ftruncate(self._descriptor, num_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
            use_large_pages(self._map)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_weights(shared: SharedWeights) -> dict[str, Tensor]:
    """Return the tensors as views of the shared memory. TransferError if the bytes are not those that were written."""
    offsets, num_bytes = stream_offsets(shared.specs)
    if num_bytes != shared.num_bytes:
        raise TransferError(f"version {shared.version} has {shared.num_bytes} bytes; its tensors take {num_bytes}")
    if num_bytes == 0:
        return {}
    descriptor = os.open(shared.file, os.O_RDWR)
    try:
        # A private view: whoever writes to a tensor does not change what others read.
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)
    stream = torch.frombuffer(memory, dtype=torch.uint8)
    digest = bucket_digest(stream)
    if digest != shared.digest:
        raise TransferError(f"version {shared.version} arrived with digest {digest}; sent was {shared.digest}")
    return {
        spec.name: stream[offset : offset + spec.num_bytes].view(_DTYPES[spec.dtype]).view(spec.shape)
        for spec, offset in zip(shared.specs, offsets, strict=True)
    }
