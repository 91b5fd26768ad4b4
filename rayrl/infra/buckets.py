"""Lay named tensors out as one stream of bytes and cut it into buckets of one size. Pure, no torch.

Tensors start at multiples of 64 bytes of the stream, so that a receiver that puts the stream in one buffer can use
every tensor as a view of it, split or not, whatever its data type, and computes with it as with one of torch's own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes, as torch allocates on CPUs: matrix products of tensors that start elsewhere may be rounded otherwise."""

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes of one element, by torch's name of the data type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its values.

    Example: `TensorSpec(name="lm_head.weight", shape=(49152, 576), dtype="bfloat16")`.
    """

    name: str
    """Name in the manifest, unique there."""
    shape: tuple[int, ...]
    """Sizes; `()` is a scalar, and a size may be 0."""
    dtype: str
    """torch's name of the data type, a key of `DTYPE_BYTES`."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name!r} has dtype {self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSlice:
    """Some bytes of one tensor within a bucket."""

    tensor_index: int
    """Position of the tensor in the list of specs."""
    tensor_offset: int
    """First byte within the tensor."""
    bucket_offset: int
    """First byte within the bucket."""
    num_bytes: int
    """Number of bytes, above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One message: consecutive bytes of the stream."""

    start: int
    """First byte within the stream."""
    num_bytes: int
    """Number of bytes, those between tensors included."""
    slices: tuple[BucketSlice, ...]
    """What is in it, in order."""


def stream_offsets(specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], int]:
    """Return the first byte of each tensor in the stream, and the length of the stream."""
    offsets, end = [], 0
    for spec in specs:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + spec.num_bytes
    return tuple(offsets), end


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets that together hold every byte of every tensor once.

    All but the last have the same size: `bucket_bytes`, rounded down to a multiple of 64. Larger tensors are split.
    Tensors without elements are in no bucket. ValueError if `bucket_bytes` is below 64.
    """
    size = bucket_bytes // ALIGNMENT * ALIGNMENT
    if size <= 0:
        raise ValueError(f"bucket_bytes={bucket_bytes} is below {ALIGNMENT}; set transfer.bucket_bytes higher")
    offsets, total = stream_offsets(specs)
    slices: list[list[BucketSlice]] = [[] for _ in range(-(-total // size))]
    for index, spec in enumerate(specs):
        done = 0
        while done < spec.num_bytes:
            bucket, within = divmod(offsets[index] + done, size)
            count = min(spec.num_bytes - done, size - within)
            slices[bucket].append(
                BucketSlice(tensor_index=index, tensor_offset=done, bucket_offset=within, num_bytes=count)
            )
            done += count
    return tuple(
        Bucket(start=index * size, num_bytes=min(size, total - index * size), slices=tuple(part))
        for index, part in enumerate(slices)
    )
