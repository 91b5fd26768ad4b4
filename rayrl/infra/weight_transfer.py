"""Send named tensors from rank 0 of a collective group to all other members, bucket by bucket, with digests.

    sender:    next tensor ─pack─> bucket ──broadcast──> ...      the digest of a bucket is computed in a thread while
    receiver:                      stream buffer <───────┘        the next one is packed and sent

The sender copies each byte once, into a bucket; the receiver never: buckets arrive in one buffer, and the staged
tensors are views of it. It moves bytes by name; what a name means is the business of whoever made the manifest.

On any failure the member closes its group, which frees the others, and raises; the group is rebuilt under the next
epoch.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from rayrl.infra.bucket_stream import bucket_digest, pack_buckets, packing_buffers, tensors_of_stream
from rayrl.infra.buckets import plan_buckets, stream_offsets
from rayrl.infra.collective_group import CollectiveGroup, PendingBroadcast
from rayrl.infra.weight_manifest import WeightManifest, checked_tensors, spec_of

__all__ = ["WeightManifest", "receive_weights", "send_weights", "spec_of"]

_SENDER = 0


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
    with _closed_on_failure(group), ThreadPoolExecutor(1, thread_name_prefix="digest") as hasher:
        group.agree("weights", manifest.fingerprint())
        buffers = packing_buffers(buckets, group.device)
        digests: list[Future[str]] = []
        pending: PendingBroadcast | None = None
        for packed in pack_buckets(buckets, checked_tensors(manifest, tensors), buffers):
            if pending is not None:
                # After this the other buffer is free: the one that is packed next.
                pending.wait()
                digests[-1].result()
            digests.append(hasher.submit(bucket_digest, packed))
            pending = group.start_broadcast(packed, _SENDER)
        if pending is not None:
            pending.wait()
        return tuple(digest.result() for digest in digests)


def receive_weights(
    group: CollectiveGroup, manifest: WeightManifest, memory: Tensor | None = None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors by name, and the digest of each bucket as it arrived. Called on every rank but 0.

    The tensors are views of one buffer: `memory` if it is on `group.device` and large enough, else a new one. The
    weights in use are not touched.

    Raises: as `send_weights`.
    """
    if group.rank == _SENDER:
        raise ValueError(f"{group.label}: rank {_SENDER} sends weights and receives none")
    buckets = plan_buckets(manifest.tensors, manifest.bucket_bytes)
    _, num_bytes = stream_offsets(manifest.tensors)
    with _closed_on_failure(group), ThreadPoolExecutor(1, thread_name_prefix="digest") as hasher:
        stream = _stream(num_bytes, group.device, memory)
        group.agree("weights", manifest.fingerprint())
        digests: list[Future[str]] = []
        for bucket in buckets:
            part = stream[bucket.start : bucket.start + bucket.num_bytes]
            group.broadcast(part, _SENDER)
            digests.append(hasher.submit(bucket_digest, part))
        return tensors_of_stream(manifest, stream), tuple(digest.result() for digest in digests)


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
