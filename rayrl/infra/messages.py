"""What travels at once: buckets cut into messages, so that large tensors need not be packed. Pure, no torch.

    bucket    | norm norm q k v o |     gate     |      up      | norm norm q ...
    messages  |      packed       | as it lies   | as it lies   |   packed

A large piece of a tensor is a message of its own, which can be sent from where it lies; the small ones between two of
these are packed into one. Sizes follow from the manifest alone, so that both sides come to the same messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayrl.infra.buckets import Bucket, BucketSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSizes:
    """Limits in bytes; the same on every member.

    Example: `MessageSizes(direct=2 << 20, packed=4 << 20, longest=16 << 20)`.
    """

    direct: int = 2 << 20
    """Pieces of at least this size are messages of their own; below, a message costs more than a copy."""
    packed: int = 4 << 20
    """What is packed together: small enough to be in the cache still when it is sent and digested."""
    longest: int = 16 << 20
    """Longer pieces are cut, so that one part is digested while the next one travels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Consecutive bytes of one bucket."""

    bucket: int
    """Index of the bucket."""
    start: int
    """First byte within the stream."""
    num_bytes: int
    """Number of bytes, those between tensors included."""
    slices: tuple[BucketSlice, ...]
    """What is in it, in order; `bucket_offset` counts from the first byte of the message."""

    @property
    def is_direct(self) -> bool:
        """Whether it is one piece of a tensor and nothing else."""
        return len(self.slices) == 1 and self.slices[0].num_bytes == self.num_bytes


def plan_messages(buckets: Sequence[Bucket], sizes: MessageSizes) -> tuple[Message, ...]:
    """Return the messages that together hold every byte of every bucket once, in the order of the stream."""
    return tuple(message for index, bucket in enumerate(buckets) for message in _of_bucket(index, bucket, sizes))


def _of_bucket(index: int, bucket: Bucket, sizes: MessageSizes) -> Iterator[Message]:
    start, small = 0, list[BucketSlice]()

    def packed(end: int) -> Iterator[Message]:
        """Yield what lies between the message before and `end`."""
        if end > start:
            yield _message(index, bucket, start, end, small)
        small.clear()

    for piece in bucket.slices:
        end = piece.bucket_offset + piece.num_bytes
        is_large = piece.num_bytes >= sizes.direct
        if is_large or end - start > sizes.packed:
            yield from packed(piece.bucket_offset)
            start = piece.bucket_offset
        if not is_large:
            small.append(piece)
            continue
        for first in range(start, end, sizes.longest):
            yield _message(index, bucket, first, min(end, first + sizes.longest), [piece])
        start = end
    yield from packed(bucket.num_bytes)


def _message(index: int, bucket: Bucket, start: int, end: int, pieces: Sequence[BucketSlice]) -> Message:
    """Return the bytes `start` to `end` of a bucket with the parts of `pieces` that lie in them."""
    slices = []
    for piece in pieces:
        first = max(start, piece.bucket_offset)
        last = min(end, piece.bucket_offset + piece.num_bytes)
        slices.append(
            BucketSlice(
                tensor_index=piece.tensor_index,
                tensor_offset=piece.tensor_offset + first - piece.bucket_offset,
                bucket_offset=first - start,
                num_bytes=last - first,
            )
        )
    return Message(bucket=index, start=bucket.start + start, num_bytes=end - start, slices=tuple(slices))
