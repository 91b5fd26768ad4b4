"""From tensors to the bytes of buckets and back, and the digests of buckets.

A bucket's digest is xxh3 over all its bytes, the zeros between tensors included; whoever holds the tensors can compute
it without packing them.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from rayrl.infra.buckets import Bucket, TensorSpec, plan_buckets, stream_offsets
from rayrl.infra.weight_manifest import TORCH_DTYPES, WeightManifest, bytes_of


def pack_buckets(buckets: Sequence[Bucket], tensors: Iterator[Tensor], buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of each bucket, in turn in one of the buffers.

    The next tensor is asked for only when its bytes are due. Bucket i is to be done with before bucket
    `i + len(buffers)` is asked for.
    """
    current, flat = -1, torch.empty(0, dtype=torch.uint8)
    for index, bucket in enumerate(buckets):
        packed = buffers[index % len(buffers)][: bucket.num_bytes]
        end = 0
        for piece in bucket.slices:
            while current < piece.tensor_index:
                current, flat = current + 1, bytes_of(next(tensors))
            packed[end : piece.bucket_offset].zero_()
            end = piece.bucket_offset + piece.num_bytes
            packed[piece.bucket_offset : end].copy_(flat[piece.tensor_offset : piece.tensor_offset + piece.num_bytes])
        packed[end:].zero_()
        if index == len(buckets) - 1:
            _drain(tensors)
        yield packed
    if not buckets:
        _drain(tensors)


def packing_buffers(buckets: Sequence[Bucket], device: torch.device) -> list[Tensor]:
    """Return two buffers, or as many as there are buckets: one is packed while the other is on its way."""
    size = max((bucket.num_bytes for bucket in buckets), default=0)
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in buckets[:2]]


def tensors_of_stream(manifest: WeightManifest, stream: Tensor) -> dict[str, Tensor]:
    """Return the tensors by name, as views of the whole stream of bytes."""
    offsets, _ = stream_offsets(manifest.tensors)
    return {
        spec.name: _view(stream[offset : offset + spec.num_bytes], spec)
        for spec, offset in zip(manifest.tensors, offsets, strict=True)
    }


def tensors_of_buckets(manifest: WeightManifest, parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name from the bytes of all buckets: views, but for tensors that were split."""
    pieces: list[list[Tensor]] = [[] for _ in manifest.tensors]
    for bucket, part in zip(plan_buckets(manifest.tensors, manifest.bucket_bytes), parts, strict=True):
        for piece in bucket.slices:
            start = piece.bucket_offset
            pieces[piece.tensor_index].append(part[start : start + piece.num_bytes])
    empty = torch.empty(0, dtype=torch.uint8)
    return {
        spec.name: _view(found[0] if len(found) == 1 else torch.cat(found or [empty]), spec)
        for spec, found in zip(manifest.tensors, pieces, strict=True)
    }


def bucket_digest(packed: Tensor) -> str:
    """Return the digest of the bytes of one bucket."""
    return str(xxhash.xxh3_128(packed.cpu().numpy().data).hexdigest())


def digests_of_tensors(manifest: WeightManifest, tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """Return the digest of each bucket from tensors in the order of the manifest; they are drawn one by one."""
    source = iter(tensors)
    digests: list[str] = []
    current, flat = -1, torch.empty(0, dtype=torch.uint8)
    for bucket in plan_buckets(manifest.tensors, manifest.bucket_bytes):
        digest, end = xxhash.xxh3_128(), 0
        for piece in bucket.slices:
            while current < piece.tensor_index:
                current, flat = current + 1, bytes_of(next(source)).cpu()
            digest.update(bytes(piece.bucket_offset - end))
            end = piece.bucket_offset + piece.num_bytes
            digest.update(flat[piece.tensor_offset : piece.tensor_offset + piece.num_bytes].numpy().data)
        digest.update(bytes(bucket.num_bytes - end))
        digests.append(digest.hexdigest())
    _drain(source)
    return tuple(digests)


def _drain(tensors: Iterator[Tensor]) -> None:
    """Run the checks on what has no bytes, and on the end, before the last bucket leaves."""
    for _ in tensors:
        pass


def _view(flat: Tensor, spec: TensorSpec) -> Tensor:
    return flat.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
