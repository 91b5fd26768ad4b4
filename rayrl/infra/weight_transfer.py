"""Send named tensors from rank 0 of a collective group to all other members, bucket by bucket, with digests.

    sender:    next tensor ──broadcast──> ...      a message is digested while it, and the one before, travel
    receiver:                  staged <──┘         a message is digested while the next one arrives

The sender copies only small tensors, which are packed into one message; what is larger is sent from where it lies. The
receiver copies nothing: messages arrive in one buffer, and the staged tensors are views of it. It moves bytes by name;
what a name means is the business of whoever made the manifest.

On any failure the member closes its group, which frees the others, and raises; the group is rebuilt under the next
epoch.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rayrl.infra.bucket_stream import BucketDigests, tensors_of_stream
from rayrl.infra.buckets import plan_buckets, stream_offsets
from rayrl.infra.collective_group import CollectiveGroup, PendingBroadcast
from rayrl.infra.message_source import MessageSource
from rayrl.infra.messages import Message, MessageSizes, plan_messages
from rayrl.infra.phase_times import PhaseTimes
from rayrl.infra.weight_manifest import WeightManifest, checked_tensors, spec_of

__all__ = ["WeightManifest", "receive_weights", "send_weights", "spec_of"]

_SENDER = 0
_IN_FLIGHT = 2
"""Messages under way at once: the second one hides what it costs to begin one."""
_SIZES = MessageSizes()


def send_weights(
    group: CollectiveGroup,
    manifest: WeightManifest,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    times: PhaseTimes | None = None,
    sizes: MessageSizes = _SIZES,
) -> tuple[str, ...]:
    """Send the tensors of the manifest and return the digest of each bucket. Called on rank 0.

    `tensors` is consumed one by one in the order of the manifest, so that it may materialise each only when it is
    asked for; a tensor that was given must keep its values until this returns. Each is compared with the manifest
    before its bytes leave.

    Args:
        times: gets the seconds of `gather`, `pack`, `digest` and `wire` (waiting for messages to leave).
        sizes: the same on every member.

    Raises:
        TransferError: a name, shape or data type differs from the manifest, the manifests of the members differ, or
            a member left.
        DeadlineExceeded: a member did not take part in time.
    """
    if group.rank != _SENDER:
        raise ValueError(f"{group.label}: only rank {_SENDER} sends weights")
    times = times or PhaseTimes()
    buckets = plan_buckets(manifest.tensors, manifest.bucket_bytes)
    messages = plan_messages(buckets, sizes)
    with _closed_on_failure(group):
        with times.of("meet"):
            group.agree("weights", manifest.fingerprint())
        source = MessageSource(
            checked_tensors(manifest, tensors), device=group.device, num_buffers=_IN_FLIGHT + 1, times=times
        )
        digests = BucketDigests(len(buckets))
        pending: deque[PendingBroadcast] = deque()
        for message, part in zip(messages, source.of(messages), strict=True):
            if len(pending) == _IN_FLIGHT:
                with times.of("wire"):
                    pending.popleft().wait()
            with times.of("wire"):
                pending.append(group.start_broadcast(part, _SENDER))
            with times.of("digest"):
                digests.add(message.bucket, part)
        with times.of("wire"):
            for broadcast in pending:
                broadcast.wait()
        return digests.results()


def receive_weights(
    group: CollectiveGroup,
    manifest: WeightManifest,
    memory: Tensor | None = None,
    *,
    times: PhaseTimes | None = None,
    sizes: MessageSizes = _SIZES,
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors by name, and the digest of each bucket as it arrived. Called on every rank but 0.

    The tensors are views of one buffer: `memory` if it is on `group.device` and large enough, else a new one. The
    weights in use are not touched. `times` gets the seconds of `meet`, `wire` (waiting for messages) and `digest`.

    Raises: as `send_weights`.
    """
    if group.rank == _SENDER:
        raise ValueError(f"{group.label}: rank {_SENDER} sends weights and receives none")
    times = times or PhaseTimes()
    buckets = plan_buckets(manifest.tensors, manifest.bucket_bytes)
    _, num_bytes = stream_offsets(manifest.tensors)
    with _closed_on_failure(group):
        stream = _stream(num_bytes, group.device, memory)
        with times.of("meet"):
            group.agree("weights", manifest.fingerprint())
        digests = BucketDigests(len(buckets))
        pending: deque[tuple[Message, Tensor, PendingBroadcast]] = deque()

        def take() -> None:
            message, part, broadcast = pending.popleft()
            with times.of("wire"):
                broadcast.wait()
            with times.of("digest"):
                digests.add(message.bucket, part)

        for message in plan_messages(buckets, sizes):
            part = stream[message.start : message.start + message.num_bytes]
            pending.append((message, part, group.start_broadcast(part, _SENDER)))
            if len(pending) > _IN_FLIGHT:
                take()
        while pending:
            take()
        return tensors_of_stream(manifest, stream), digests.results()


def _stream(num_bytes: int, device: torch.device, memory: Tensor | None) -> Tensor:
    if memory is not None and memory.device.type == device.type and memory.numel() >= num_bytes:
        return memory[:num_bytes]
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@contextmanager
def _closed_on_failure(group: CollectiveGroup) -> Iterator[None]:
    try:
        yield
    except BaseException:
        group.close()
        raise
