"""What a weight version consists of, and the check of tensors against it."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from rayrl.errors import TransferError
from rayrl.infra.buckets import DTYPE_BYTES, TensorSpec

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""torch's data types by their names in a `TensorSpec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """What is about to be sent; the same on every member.

    Example: `WeightManifest(version=3, tensors=(TensorSpec(...),), bucket_bytes=67108864)`.
    """

    version: int
    """Weight version."""
    tensors: tuple[TensorSpec, ...]
    """All tensors, in the order in which they are sent."""
    bucket_bytes: int
    """Size of one bucket, `transfer.bucket_bytes`."""

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise TransferError(f"weight manifest of version {self.version} names tensors twice: {', '.join(twice)}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.tensors)

    def fingerprint(self) -> str:
        """Return a short text that is equal only for equal manifests."""
        rows = [self.bucket_bytes, *([spec.name, spec.shape, spec.dtype] for spec in self.tensors)]
        digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
        return f"version {self.version}, {len(self.tensors)} tensors, {self.num_bytes} bytes, {digest}"


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Return the spec of a tensor."""
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the values as uint8 in row-major order; a view where the tensor is laid out so already."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum_of(tensor: Tensor) -> str:
    """Return the digest of the values of one tensor; equal for equal bits, wherever and however they are held."""
    return str(xxhash.xxh3_128(bytes_of(tensor).cpu().numpy().data).hexdigest())


def checked_tensors(manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """Yield the tensors after comparing each with the manifest; the end of the iterator is compared, too.

    TransferError with the first difference.
    """
    source = iter(tensors)
    where = f"weights of version {manifest.version}"
    for index, spec in enumerate(manifest.tensors):
        pair = next(source, None)
        if pair is None:
            raise TransferError(
                f"{where}: {index} tensors came, the manifest has {len(manifest.tensors)}; "
                f"the first that is missing is {spec.name!r}"
            )
        name, tensor = pair
        actual = spec_of(name, tensor)
        if actual != spec:
            raise TransferError(f"{where}: tensor {index} is {_show(actual)}, the manifest says {_show(spec)}")
        yield tensor
    extra = next(source, None)
    if extra is not None:
        raise TransferError(f"{where}: {extra[0]!r} came after the last tensor of the manifest")


def _show(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}{list(spec.shape)}"
