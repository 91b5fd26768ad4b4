"""From tensors to the bytes of buckets and back, and the digests of buckets.

A bucket's digest is xxh3 over all its bytes, the zeros between tensors included; whoever holds the tensors can compute
it without packing them.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
import xxhash
from torch import Tensor

from rayrl.infra.buckets import TensorSpec, plan_buckets, stream_offsets
from rayrl.infra.phase_times import PhaseTimes
from rayrl.infra.weight_manifest import TORCH_DTYPES, WeightManifest, bytes_of


class BucketDigests:
    """Digests of all buckets from their bytes, which come part by part in the order of the stream."""

    def __init__(self, num_buckets: int) -> None:
        self._digests = [xxhash.xxh3_128() for _ in range(num_buckets)]

    def add(self, bucket: int, part: Tensor) -> None:
        """Take the next bytes of a bucket."""
        self._digests[bucket].update(part.cpu().numpy().data)

    def results(self) -> tuple[str, ...]:
        """Return the digest of each bucket."""
        return tuple(digest.hexdigest() for digest in self._digests)


def tensors_of_stream(manifest: WeightManifest, stream: Tensor) -> dict[str, Tensor]:
    """Return the tensors by name, as views of the whole stream of bytes."""
    offsets, _ = stream_offsets(manifest.tensors)
    return {
        spec.name: tensor_of_bytes(stream[offset : offset + spec.num_bytes], spec)
        for spec, offset in zip(manifest.tensors, offsets, strict=True)
    }


def copy_to_stream(manifest: WeightManifest, tensors: Mapping[str, Tensor], stream: Tensor) -> dict[str, Tensor]:
    """Copy the tensors into the whole stream of bytes, and return them as views of it; those that are there stay."""
    staged = tensors_of_stream(manifest, stream)
    for name, target in staged.items():
        source = tensors[name]
        if source.data_ptr() != target.data_ptr() or not source.is_contiguous():
            target.copy_(source)
    return staged


def bucket_digest(packed: Tensor) -> str:
    """Return the digest of the bytes of one bucket."""
    return str(xxhash.xxh3_128(packed.cpu().numpy().data).hexdigest())


def digests_of_tensors(
    manifest: WeightManifest, tensors: Iterable[Tensor], times: PhaseTimes | None = None
) -> tuple[str, ...]:
    """Return the digest of each bucket from tensors in the order of the manifest; they are drawn one by one.

    `times` gets the seconds of `digest`, without those of drawing.
    """
    times = times or PhaseTimes()
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
            with times.of("digest"):
                digest.update(flat[piece.tensor_offset : piece.tensor_offset + piece.num_bytes].numpy().data)
        digest.update(bytes(bucket.num_bytes - end))
        digests.append(digest.hexdigest())
    _drain(source)
    return tuple(digests)


def _drain(tensors: Iterator[Tensor]) -> None:
    """Run the checks on what has no bytes, and on the end, before the last bucket leaves."""
    for _ in tensors:
        pass


def tensor_of_bytes(flat: Tensor, spec: TensorSpec) -> Tensor:
    """Return the tensor whose values are these bytes; a view."""
    return flat.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
