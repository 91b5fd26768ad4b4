"""What arrives is what was sent, bit by bit, and what differs is seen."""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.errors import TransferError
from rayrl.infra.buckets import DTYPE_BYTES
from rayrl.infra.messages import MessageSizes
from rayrl.infra.weight_transfer import WeightManifest, receive_weights, send_weights, spec_of


class LoopbackGroup:
    """Two members joined by a queue; can damage one byte on the way and keeps a log."""

    label = "loopback"
    device = torch.device("cpu")

    def __init__(self, rank: int, wire: "queue.Queue[torch.Tensor]", damaged: tuple[int, int] | None = None) -> None:
        self.rank = rank
        self.wire = wire
        self.damaged = damaged
        self.log: list[str] = []
        self.num_received = 0
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.closed = False

    def agree(self, topic: str, value: str) -> None:
        self.log.append(f"agree {value}")

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> "LoopbackBroadcast":
        if self.rank == source:
            self.log.append("send")
            self.wire.put(tensor.clone())
            self.sent.append((tensor, tensor.clone()))
        return LoopbackBroadcast(self, tensor)

    def close(self) -> None:
        self.closed = True


class LoopbackBroadcast:
    """One message of a `LoopbackGroup`; a received one arrives when it is waited for."""

    def __init__(self, group: LoopbackGroup, tensor: torch.Tensor) -> None:
        self.group = group
        self.tensor = tensor

    def wait(self) -> None:
        group = self.group
        if group.rank == 0:
            tensor, copy = group.sent[group.log.count("sent")]
            assert tensor.equal(copy), "the bytes of a message changed while it was under way"
            group.log.append("sent")
            return
        self.tensor.copy_(group.wire.get(timeout=5))
        if group.damaged is not None and group.damaged[0] == group.num_received:
            self.tensor[group.damaged[1]] ^= 1
        group.num_received += 1


SIZES = [
    MessageSizes(),
    MessageSizes(direct=16, packed=64, longest=48),
    MessageSizes(direct=100, packed=70, longest=100),
]
"""All packed but for what is cut by buckets; small direct pieces in parts; and some of both."""


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(50, 7, generator=generator)
    return {
        "embed.weight": embedding,
        "lm_head.weight": embedding,
        "transposed": torch.randn(6, 5, generator=generator).t(),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
        "ids": torch.arange(9),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }


def _manifest(weights: dict[str, torch.Tensor], bucket_bytes: int) -> WeightManifest:
    specs = tuple(spec_of(name, tensor) for name, tensor in weights.items())
    return WeightManifest(version=3, tensors=specs, bucket_bytes=bucket_bytes)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _assert_same(received: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert _bytes(received[name]) == _bytes(tensor)


@pytest.mark.distributed
@pytest.mark.parametrize("bucket_bytes", [1024, 64, 1 << 20])
def test_every_engine_gets_the_same_bits_over_gloo(hosted, run_members, bucket_bytes) -> None:
    weights = _weights()
    manifest = _manifest(weights, bucket_bytes)
    receive = [lambda group: receive_weights(group, manifest)] * 2

    sent, *received = run_members(hosted, [lambda group: send_weights(group, manifest, weights.items()), *receive])

    for staged, digests in received:
        _assert_same(staged, weights)
        assert digests == sent
    assert len(sent) == -(-_stream_bytes(manifest) // bucket_bytes)


def _stream_bytes(manifest: WeightManifest) -> int:
    position = 0
    for spec in manifest.tensors:
        position = -(-position // 64) * 64 + spec.num_bytes
    return position


@pytest.mark.distributed
def test_a_group_carries_several_versions_in_turn(hosted, run_members) -> None:
    versions = [{"w": torch.full((100,), float(version))} for version in range(4)]

    def send(group: Any) -> list[Any]:
        return [send_weights(group, _manifest(weights, 64), weights.items()) for weights in versions]

    def receive(group: Any) -> list[Any]:
        return [receive_weights(group, _manifest(weights, 64)) for weights in versions]

    sent, received = run_members(hosted, [send, receive])

    for weights, digests, (staged, theirs) in zip(versions, sent, received, strict=True):
        _assert_same(staged, weights)
        assert digests == theirs


@pytest.mark.distributed
def test_receivers_are_freed_when_the_sender_fails_in_the_middle(hosted, run_members) -> None:
    weights = {f"layer-{index}": torch.zeros(64) for index in range(4)}
    manifest = _manifest(weights, 256)
    broken = {**weights, "layer-2": torch.zeros(65)}

    sender, receiver = run_members(
        hosted,
        [
            lambda group: send_weights(group, manifest, broken.items()),
            lambda group: receive_weights(group, manifest),
        ],
        timeout_s=200.0,
    )

    assert isinstance(sender, TransferError)
    assert "tensor 2 is 'layer-2' float32[65], the manifest says 'layer-2' float32[64]" in str(sender)
    assert isinstance(receiver, TransferError)


@pytest.mark.distributed
def test_nothing_is_sent_when_the_manifests_differ(hosted, run_members) -> None:
    weights = _weights()
    drawn: list[str] = []

    def draw() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            drawn.append(name)
            yield name, tensor

    sender, receiver = run_members(
        hosted,
        [
            lambda group: send_weights(group, _manifest(weights, 1024), draw()),
            lambda group: receive_weights(group, _manifest(weights, 2048)),
        ],
    )

    assert isinstance(sender, TransferError) and "the members differ: inference-0 has weights=" in str(sender)
    assert isinstance(receiver, TransferError)
    assert drawn == []


def _loopback(
    weights: dict[str, torch.Tensor],
    bucket_bytes: int,
    damaged: tuple[int, int] | None = None,
    sizes: MessageSizes = SIZES[0],
) -> tuple[tuple[str, ...], dict[str, torch.Tensor], tuple[str, ...]]:
    wire: queue.Queue[torch.Tensor] = queue.Queue()
    manifest = _manifest(weights, bucket_bytes)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive_weights, LoopbackGroup(1, wire, damaged), manifest, sizes=sizes)  # type: ignore[arg-type]
        sent = send_weights(LoopbackGroup(0, wire), manifest, weights.items(), sizes=sizes)  # type: ignore[arg-type]
        return sent, *receiving.result()


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=3), st.sampled_from(sorted(DTYPE_BYTES))), max_size=8),
    bucket_bytes=st.integers(64, 300),
    sizes=st.sampled_from(SIZES),
)
def test_any_tensors_arrive_bit_equal_for_any_bucket_size(rows, bucket_bytes, sizes) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for index, (shape, dtype) in enumerate(rows):
        num_bytes = DTYPE_BYTES[dtype] * int(torch.tensor(shape or [1]).prod())
        raw = torch.randint(0, 2, (num_bytes,), dtype=torch.uint8, generator=generator)
        weights[f"t{index}"] = raw.view(getattr(torch, dtype)).view(shape)

    sent, staged, received = _loopback(weights, bucket_bytes, sizes=sizes)

    _assert_same(staged, weights)
    assert sent == received


@pytest.mark.parametrize("damaged", [(0, 0), (1, 255), (2, 17)])
def test_digest_of_one_bucket_differs_when_one_bit_of_it_is_damaged(damaged) -> None:
    weights = {"w": torch.arange(192, dtype=torch.float32)}

    sent, _, received = _loopback(weights, 256, damaged)

    assert [index for index, (a, b) in enumerate(zip(sent, received, strict=True)) if a != b] == [damaged[0]]


def test_tensors_are_asked_for_only_when_the_messages_before_are_on_their_way() -> None:
    group = LoopbackGroup(0, queue.Queue())
    weights = {f"w{index}": torch.zeros(64) for index in range(4)}

    def draw() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            group.log.append(f"draw {name}")
            yield name, tensor

    send_weights(group, _manifest(weights, 256), draw())  # type: ignore[arg-type]

    first, *later = ([f"draw w{index}", "send"] for index in range(4))
    # Two are under way at once.
    expected = [*first, *later[0], later[1][0], "sent", "send", later[2][0], "sent", "send", "sent", "sent"]
    assert group.log[1:] == expected


def test_large_tensors_are_sent_from_where_they_lie_and_small_ones_packed() -> None:
    group = LoopbackGroup(0, queue.Queue())
    weights = {"a": torch.ones(4), "b": torch.ones(64), "c": torch.ones(5), "d": torch.ones(3)}
    sizes = MessageSizes(direct=128, packed=4096, longest=160)

    send_weights(group, _manifest(weights, 1024), weights.items(), sizes=sizes)  # type: ignore[arg-type]

    start = weights["b"].data_ptr()
    sent = [(tensor.data_ptr() - start, tensor.numel()) for tensor, _ in group.sent]
    assert sent[1:3] == [(0, 160), (160, 96)]
    assert [length for _, length in sent] == [64, 160, 96, 64 + 12]


def test_bytes_between_tensors_are_zero_when_a_buffer_is_used_again() -> None:
    group = LoopbackGroup(0, queue.Queue())
    odd = [torch.full((17,), 255, dtype=torch.uint8)] * 3
    full = [torch.full((64,), 255, dtype=torch.uint8)] * 4
    weights = {f"w{index}": tensor for index, tensor in enumerate([*full, *odd])}

    send_weights(group, _manifest(weights, 64), weights.items())  # type: ignore[arg-type]

    sent = torch.cat(list(group.wire.queue))
    assert sent.count_nonzero().item() == sum(tensor.numel() for tensor in weights.values())


def test_views_of_the_receiver_share_one_buffer_when_tensors_are_split() -> None:
    weights = {"a": torch.randn(100), "b": torch.randn(3)}

    _, staged, _ = _loopback(weights, 64)

    assert staged["a"].untyped_storage().data_ptr() == staged["b"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"a": torch.zeros(2)}, "1 tensors came, the manifest has 2; the first that is missing is 'b'"),
        ({"a": torch.zeros(2), "c": torch.zeros(2)}, "tensor 1 is 'c' float32[2], the manifest says 'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(2).half()}, "tensor 1 is 'b' float16[2]"),
        ({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)}, "'c' came after the last tensor"),
    ],
)
def test_nothing_leaves_when_the_tensors_of_one_bucket_differ_from_the_manifest(sent, message) -> None:
    group = LoopbackGroup(0, queue.Queue())
    manifest = _manifest({"a": torch.zeros(2), "b": torch.zeros(2)}, 1024)

    with pytest.raises(TransferError) as caught:
        send_weights(group, manifest, sent.items())  # type: ignore[arg-type]

    assert message in str(caught.value)
    assert "send" not in group.log
    assert group.closed


def test_manifest_is_refused_when_a_name_comes_twice() -> None:
    spec = spec_of("w", torch.zeros(1))

    with pytest.raises(TransferError, match="names tensors twice: w"):
        WeightManifest(version=1, tensors=(spec, spec), bucket_bytes=1024)
