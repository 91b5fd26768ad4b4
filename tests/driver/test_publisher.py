"""Publication: the order of its phases, and what an abort leaves behind. Groups are hand-written fakes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from rayrl.config.run import RunConfig
from rayrl.config.transfer import TransferConfig
from rayrl.driver.publisher import Publisher
from rayrl.errors import DeadlineExceeded, TransferError
from rayrl.infra.buckets import TensorSpec
from rayrl.infra.publication import EngineAck
from rayrl.infra.weight_route import Parcel, SentWeights
from rayrl.infra.weight_transfer import WeightManifest

SPECS = (TensorSpec(name="w", shape=(2, 2), dtype="float32"),)


@dataclass
class FakeMember:
    name: str


class FakeGroup:
    """Answers calls from a table and writes them down."""

    def __init__(self, name: str, size: int, calls: list[str], answers: dict[str, Callable[..., Any]]) -> None:
        self.members = [FakeMember(f"{name}-{index}") for index in range(size)]
        self._name = name
        self._calls = calls
        self._answers = answers

    async def call(self, index: int, method: str, *args: Any, seconds: float, phase: str) -> Any:
        self._calls.append(f"{self._name}-{index}.{method}")
        return self._answers.get(method, lambda index, *args: None)(index, *args)

    async def call_all(self, method: str, *args: Any, seconds: float, phase: str) -> list[Any]:
        return [
            await self.call(index, method, *args, seconds=seconds, phase=phase) for index in range(len(self.members))
        ]

    async def call_each(self, method: str, args_per_member: list[Any], *, seconds: float, phase: str) -> list[Any]:
        return [
            await self.call(index, method, *args, seconds=seconds, phase=phase)
            for index, args in enumerate(args_per_member)
        ]


@pytest.fixture
def config(repo_root: Any) -> RunConfig:
    return RunConfig.load(repo_root / "configs" / "smollm2_chain_sum.yaml")


def make(
    config: RunConfig,
    receive: Callable[..., Any],
    commit: Callable[..., Any] | None = None,
    parcel: Parcel | None = None,
) -> tuple[Publisher, list[str]]:
    calls: list[str] = []
    train = FakeGroup(
        "train",
        1,
        calls,
        {
            "host_transfer_rendezvous": lambda index: "address",
            "weight_manifest": lambda index, version: WeightManifest(version=version, tensors=SPECS, bucket_bytes=1024),
            "send_weights": lambda index, version: SentWeights(digests=("aa", "bb"), parcel=parcel),
        },
    )
    answers: dict[str, Callable[..., Any]] = {"receive": receive}
    if commit is not None:
        answers["commit"] = commit
    inference = FakeGroup("inference", 2, calls, answers)
    return Publisher(config=config, train=train, inference=inference), calls  # type: ignore[arg-type]


def good_ack(index: int, manifest: WeightManifest, *_: Any) -> EngineAck:
    return EngineAck(engine=f"inference-{index}", version=manifest.version, digests=("aa", "bb"))


@pytest.mark.asyncio
async def test_engines_commit_only_after_all_have_acknowledged(config: RunConfig) -> None:
    publisher, calls = make(config, good_ack)
    record = await publisher.publish(3)
    engine_calls = [call for call in calls if call.startswith("inference")]
    assert [call.split(".")[1] for call in engine_calls] == ["prepare"] * 2 + ["receive"] * 2 + ["commit"] * 2
    assert (record.version, record.engines, record.num_bytes) == (3, ("inference-0", "inference-1"), 16)


@pytest.mark.asyncio
async def test_wrong_digest_aborts_without_commit_and_the_second_try_runs_under_the_next_epoch(
    config: RunConfig,
) -> None:
    tries: list[int] = []

    def receive(index: int, manifest: WeightManifest, *_: Any) -> EngineAck:
        tries.append(index)
        digests = ("aa", "xx") if tries == [0, 1] else ("aa", "bb")
        return EngineAck(engine=f"inference-{index}", version=manifest.version, digests=digests)

    publisher, calls = make(config, receive)
    await publisher.connect()
    calls.clear()
    record = await publisher.publish(1)
    methods = [call.split(".")[1] for call in calls]
    assert methods.index("discard") < methods.index("join_transfer") < methods.index("commit")
    assert methods.count("commit") == 2
    assert record.version == 1


@pytest.mark.asyncio
async def test_digest_that_stays_wrong_ends_the_run_and_names_engine_and_bucket(config: RunConfig) -> None:
    def receive(index: int, manifest: WeightManifest, *_: Any) -> EngineAck:
        digests = ("aa", "xx") if index == 1 else ("aa", "bb")
        return EngineAck(engine=f"inference-{index}", version=manifest.version, digests=digests)

    publisher, calls = make(config, receive)
    with pytest.raises(TransferError, match=r"inference-1: .*bucket 1"):
        await publisher.publish(1)
    assert not [call for call in calls if call.endswith("commit")]


@pytest.mark.asyncio
async def test_failed_commit_is_not_tried_again(config: RunConfig) -> None:
    def commit(index: int, version: int) -> None:
        raise DeadlineExceeded("inference-0 did not commit")

    publisher, calls = make(config, good_ack, commit)
    with pytest.raises(DeadlineExceeded, match="did not commit"):
        await publisher.publish(1)
    assert [call for call in calls if call.endswith("commit")] == ["inference-0.commit"]


@pytest.mark.asyncio
async def test_stored_route_sends_before_engines_receive_and_is_freed_after_the_commit(config: RunConfig) -> None:
    stored = config.model_copy(update={"transfer": TransferConfig(backend="disk")})
    parcel = Parcel(version=1, fingerprint="", digests=("aa", "bb"), device="", content="folder")
    received: list[Any] = []

    def receive(index: int, manifest: WeightManifest, parcels: Any, timeout_s: float) -> EngineAck:
        received.append((parcels, timeout_s < stored.driver.deadlines.publication_s))
        return good_ack(index, manifest)

    publisher, calls = make(stored, receive, parcel=parcel)
    await publisher.connect()
    assert calls == [], "there is no group to join"
    await publisher.publish(1)

    assert received == [((parcel,), True)] * 2
    methods = [call.split(".")[1] for call in calls]
    assert methods == [
        "weight_manifest",
        *["prepare"] * 2,
        "send_weights",
        *["receive"] * 2,
        *["commit"] * 2,
        "release_weights",
    ]
