"""Send named tensors from rank 0 of a collective group to all other members, bucket by bucket, with digests.

    sender:    next tensor ─pack─> bucket ──broadcast──> ...      the digest of a bucket is computed in a thread while
    receiver:                      stream buffer <───────┘        the next one is packed and sent

The sender copies each byte once, into a bucket; the receiver never: buckets arrive in one buffer, and the staged
tensors are views of it. It moves bytes by name; what a name means is the business of whoever made the manifest.

On any failure the member closes its group, which frees the others, and raises; the group is rebuilt under the next
epoch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from rayrl.errors import TransferError
from rayrl.infra.buckets import DTYPE_BYTES, Bucket, TensorSpec, plan_buckets, stream_offsets
from rayrl.infra.collective_group import CollectiveGroup, PendingBroadcast

_SENDER = 0
_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


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
    """Size of one broadcast, `transfer.bucket_bytes`."""

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


def send_weights(
    group: CollectiveGroup, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]
) -> tuple[str, ...]:
    """Send the tensors of the manifest and return the digest of each bucket. Called on rank 0.

    `tensors` is consumed one by one in the order of the manifest, so that it may materialise each only when it is
    asked for; a tensor is not used any more once the next one was asked for. Each is compared with the manifest
    before its bytes are packed.

    Raises:
        TransferError: a name, shape or data type differs from the manifest, the manifests of the members differ, or
            a member left.
        DeadlineExceeded: a member did not take part in time.
    """
    if group.rank != _SENDER:
        raise ValueError(f"{group.label}: only rank {_SENDER} sends weights")
    buckets = plan_buckets(manifest.tensors, manifest.bucket_bytes)
    size = max((bucket.num_bytes for bucket in buckets), default=0)
    with _closed_on_failure(group), ThreadPoolExecutor(1, thread_name_prefix="digest") as hasher:
        group.agree("weights", manifest.fingerprint())
        # Two buffers: one is packed while the other is on its way.
        buffers = [torch.empty(size, dtype=torch.uint8, device=group.device) for _ in buckets[:2]]
        digests: list[Future[str]] = []
        pending: PendingBroadcast | None = None
        for packed in _pack(buckets, _checked(manifest, tensors), buffers):
            if pending is not None:
                # After this the other buffer is free: the one that `_pack` writes to next.
                pending.wait()
                digests[-1].result()
            digests.append(hasher.submit(_digest, packed))
            pending = group.start_broadcast(packed, _SENDER)
        if pending is not None:
            pending.wait()
        return tuple(digest.result() for digest in digests)


def receive_weights(group: CollectiveGroup, manifest: WeightManifest) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors by name, and the digest of each bucket as it arrived. Called on every rank but 0.

    The tensors are views of one buffer on `group.device`; the weights in use are not touched.

    Raises: as `send_weights`.
    """
    if group.rank == _SENDER:
        raise ValueError(f"{group.label}: rank {_SENDER} sends weights and receives none")
    buckets = plan_buckets(manifest.tensors, manifest.bucket_bytes)
    offsets, num_bytes = stream_offsets(manifest.tensors)
    with _closed_on_failure(group), ThreadPoolExecutor(1, thread_name_prefix="digest") as hasher:
        stream = torch.empty(num_bytes, dtype=torch.uint8, device=group.device)
        group.agree("weights", manifest.fingerprint())
        digests: list[Future[str]] = []
        for bucket in buckets:
            part = stream[bucket.start : bucket.start + bucket.num_bytes]
            group.broadcast(part, _SENDER)
            digests.append(hasher.submit(_digest, part))
        staged = {
            spec.name: _view(stream, spec, offset) for spec, offset in zip(manifest.tensors, offsets, strict=True)
        }
        return staged, tuple(digest.result() for digest in digests)


@contextmanager
def _closed_on_failure(group: CollectiveGroup) -> Iterator[None]:
    try:
        yield
    except BaseException:
        group.close()
        raise


def _checked(manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """Yield the tensors after comparing each with the manifest; the end of the iterator is compared, too."""
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


def _pack(buckets: Sequence[Bucket], tensors: Iterator[Tensor], buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of each bucket, in turn in one of the buffers."""
    current, flat = -1, torch.empty(0, dtype=torch.uint8)
    for index, bucket in enumerate(buckets):
        packed = buffers[index % len(buffers)][: bucket.num_bytes]
        end = 0
        for piece in bucket.slices:
            while current < piece.tensor_index:
                current, tensor = current + 1, next(tensors)
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            packed[end : piece.bucket_offset].zero_()
            end = piece.bucket_offset + piece.num_bytes
            packed[piece.bucket_offset : end].copy_(flat[piece.tensor_offset : piece.tensor_offset + piece.num_bytes])
        packed[end:].zero_()
        if index == len(buckets) - 1:
            _drain(tensors)
        yield packed
    if not buckets:
        _drain(tensors)


def _drain(tensors: Iterator[Tensor]) -> None:
    """Run the checks on what has no bytes, and on the end, before the last bucket leaves."""
    for _ in tensors:
        pass


def _view(stream: Tensor, spec: TensorSpec, offset: int) -> Tensor:
    return stream[offset : offset + spec.num_bytes].view(_TORCH_DTYPES[spec.dtype]).view(spec.shape)


def _digest(packed: Tensor) -> str:
    return str(xxhash.xxh3_128(packed.cpu().numpy().data).hexdigest())
