"""Publication: the order of its phases, whom a failure is laid to, and what is left behind. Groups are fakes."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from rayrl.config.run import RunConfig
from rayrl.config.transfer import TransferConfig
from rayrl.driver.failure_policy import FaultCause
from rayrl.driver.publisher import Publisher
from rayrl.errors import ActorDied, DeadlineExceeded, EngineError, TransferError
from rayrl.inference.engine import LoadTimes
from rayrl.infra.actor_group import Member
from rayrl.infra.buckets import TensorSpec
from rayrl.infra.identity import ActorLabel
from rayrl.infra.outcomes import PendingCall
from rayrl.infra.publication import EngineAck
from rayrl.infra.weight_route import Parcel, SentWeights
from rayrl.infra.weight_transfer import WeightManifest

SPECS = (TensorSpec(name="w", shape=(2, 2), dtype="float32"),)


def good_ack(index: int, manifest: WeightManifest, *_: Any) -> EngineAck:
    return EngineAck(engine=f"inference-{index}", version=manifest.version, digests=("aa", "bb"))


def load_times(index: int, version: int) -> LoadTimes:
    return LoadTimes(load_s=1.0 + index, pause_s=2.0 + index)


class FakeGroup:
    """Answers calls from a table, by method and then index, and writes them down."""

    def __init__(self, name: str, size: int, calls: list[str], answers: dict[str, Callable[..., Any]]) -> None:
        self.name = name
        self.members = [self._member(index) for index in range(size)]
        self.calls = calls
        self.answers = answers

    def _member(self, index: int) -> Member:
        return Member(name=f"{self.name}-{index}", index=index, handle=None, node="", host="", pid=0)

    def add(self, index: int) -> None:
        self.members.append(self._member(index))

    def find(self, name: str) -> Member | None:
        return next((member for member in self.members if member.name == name), None)

    def remove(self, name: str) -> Member | None:
        member = self.find(name)
        if member is not None:
            self.members.remove(member)
        return member

    async def wait_member(self, deadline: float, *, phase: str) -> Member:
        if not self.members:
            raise DeadlineExceeded(f"{phase}: no engine is left")
        return self.members[0]

    async def _answer(self, member: Member, method: str, args: tuple[Any, ...]) -> Any:
        self.calls.append(f"{member.name}.{method}")
        result = self.answers.get(method, lambda index, *args: None)(member.index, *args)
        if isinstance(result, Exception):
            raise result
        if isinstance(result, asyncio.Event):
            await result.wait()
        return result

    async def call(self, index: int, method: str, *args: Any, seconds: float, phase: str) -> Any:
        return await self._answer(self.members[index], method, args)

    async def call_all(self, method: str, *args: Any, seconds: float, phase: str) -> list[Any]:
        return [await self._answer(member, method, args) for member in self.members]

    def submit(self, method: str, *args: Any, names: Collection[str] | None = None) -> list[PendingCall]:
        return [
            PendingCall(actor=ActorLabel(name=member.name), ref=self._answer(member, method, args))
            for member in self.members
            if names is None or member.name in names
        ]


class Stage:
    """A publisher over fakes, with what it called and whom it blamed."""

    def __init__(
        self,
        config: RunConfig,
        num_engines: int = 2,
        parcel: Parcel | None = None,
        **engine_answers: Callable[..., Any],
    ) -> None:
        self.calls: list[str] = []
        self.faults: list[tuple[str, FaultCause]] = []
        self.train = FakeGroup(
            "train",
            1,
            self.calls,
            {
                "host_transfer_rendezvous": lambda index: None,
                "weight_manifest": lambda index, version: WeightManifest(
                    version=version, tensors=SPECS, bucket_bytes=1024
                ),
                "send_weights": lambda index, version: SentWeights(digests=("aa", "bb"), parcel=parcel),
            },
        )
        self.inference = FakeGroup(
            "inference", num_engines, self.calls, {"receive": good_ack, "commit": load_times, **engine_answers}
        )
        self.publisher = Publisher(config=config, train=self.train, inference=self.inference)  # type: ignore[arg-type]
        self.publisher.on_fault = lambda name, cause, reason: self.faults.append((name, cause))

    def methods(self, member: str) -> list[str]:
        return [call.split(".")[1] for call in self.calls if call.startswith(f"{member}.")]


@pytest.fixture
def config(repo_root: Any) -> RunConfig:
    return RunConfig.load(repo_root / "configs" / "smollm2_chain_sum.yaml", ["driver.deadlines.publication_s=0.2"])


@pytest.mark.asyncio
async def test_engines_commit_only_after_all_have_acknowledged(config: RunConfig) -> None:
    stage = Stage(config)
    record = await stage.publisher.publish(3)
    engine_calls = [call.split(".")[1] for call in stage.calls if call.startswith("inference")]
    assert engine_calls == ["join_transfer"] * 2 + ["prepare"] * 2 + ["receive"] * 2 + ["commit"] * 2
    assert (record.version, record.engines, record.num_bytes) == (3, ("inference-0", "inference-1"), 16)
    assert (record.load_s, record.pause_s) == (2.0, 3.0), "of the slowest engine"
    assert set(stage.publisher.serving) == {"inference-0", "inference-1"}


@pytest.mark.asyncio
async def test_seconds_of_the_trainer_and_of_the_slowest_engine_are_recorded(config: RunConfig) -> None:
    def receive(index: int, manifest: WeightManifest, *_: Any) -> EngineAck:
        times = {"wire": 1.0 + index, "digest": 0.5 - 0.1 * index}
        return replace(good_ack(index, manifest), times=times)

    stage = Stage(config, receive=receive)
    sent = SentWeights(digests=("aa", "bb"), parcel=None, times={"pack": 0.25})
    stage.train.answers["send_weights"] = lambda index, version: sent

    phases = dict((await stage.publisher.publish(3)).phases)

    assert phases.pop("prepare") >= 0
    assert phases == {"send_pack": 0.25, "receive_wire": 2.0, "receive_digest": 0.5}


@pytest.mark.asyncio
async def test_transfer_group_is_built_once_while_its_members_stay(config: RunConfig) -> None:
    stage = Stage(config)
    await stage.publisher.publish(0)
    await stage.publisher.publish(1)
    assert stage.methods("train-0").count("join_transfer") == 1
    assert stage.methods("inference-0").count("join_transfer") == 1


@pytest.mark.asyncio
async def test_engine_with_wrong_digest_is_quarantined_and_the_others_get_the_version_at_the_next_try(
    config: RunConfig,
) -> None:
    def receive(index: int, manifest: WeightManifest, *_: Any) -> EngineAck:
        digests = ("aa", "xx") if index == 1 else ("aa", "bb")
        return EngineAck(engine=f"inference-{index}", version=manifest.version, digests=digests)

    stage = Stage(config, receive=receive)
    record = await stage.publisher.publish(1)
    assert stage.faults == [("inference-1", FaultCause.WRONG_WEIGHTS)]
    assert (record.engines, record.missing) == (("inference-0",), ("inference-1",))
    assert stage.methods("inference-0") == [
        *("join_transfer", "prepare", "receive", "discard"),
        *("join_transfer", "prepare", "receive", "commit"),
    ]
    assert "commit" not in stage.methods("inference-1")


@pytest.mark.asyncio
@pytest.mark.parametrize("phase", ["join_transfer", "prepare", "receive"])
async def test_death_before_the_commit_costs_one_attempt_and_only_the_dead_engine(
    config: RunConfig, phase: str
) -> None:
    def answer(index: int, *args: Any) -> Any:
        if index == 1:
            return EngineError("inference-1 fell over")
        if phase == "receive" and len(stage.inference.members) == 2:
            return TransferError("connection closed by peer")
        return good_ack(index, args[0]) if phase == "receive" else None

    stage = Stage(config, **{phase: answer})
    record = await stage.publisher.publish(1)
    assert stage.faults == [("inference-1", FaultCause.FAILED)]
    assert record.engines == ("inference-0",)
    assert stage.methods("inference-0").count("commit") == 1
    assert stage.methods("train-0").count("join_transfer") == 2


@pytest.mark.asyncio
async def test_engine_that_fails_its_commit_is_quarantined_and_the_others_keep_the_version(config: RunConfig) -> None:
    stage = Stage(
        config, commit=lambda index, version: DeadlineExceeded("too slow") if index == 0 else load_times(1, 1)
    )
    record = await stage.publisher.publish(2)
    assert [name for name, _ in stage.faults] == ["inference-0"]
    assert (record.engines, record.missing) == (("inference-1",), ("inference-0",))
    assert stage.methods("inference-1").count("commit") == 1
    assert set(stage.publisher.serving) == {"inference-1"}


@pytest.mark.asyncio
async def test_silent_engine_is_blamed_when_nobody_else_is(config: RunConfig) -> None:
    never = asyncio.Event()
    stage = Stage(config, receive=lambda index, manifest, *_: never if index == 0 else good_ack(index, manifest))
    record = await stage.publisher.publish(1)
    assert stage.faults == [("inference-0", FaultCause.SILENT)]
    assert record.engines == ("inference-1",)


@pytest.mark.asyncio
async def test_failure_without_an_engine_to_blame_is_tried_once_more_and_then_raised(config: RunConfig) -> None:
    stage = Stage(config, receive=lambda index, manifest, *_: TransferError("the network is gone"))
    with pytest.raises(TransferError, match="the network is gone"):
        await stage.publisher.publish(1)
    assert stage.faults == []
    assert stage.methods("inference-0").count("receive") == 2
    assert "commit" not in stage.methods("inference-0")


@pytest.mark.asyncio
async def test_death_of_the_trainer_ends_the_publication_and_names_it(config: RunConfig) -> None:
    stage = Stage(config, receive=lambda index, manifest, *_: TransferError("connection closed by peer"))
    stage.train.answers["send_weights"] = lambda index, version: ActorDied("train-0 died")
    with pytest.raises(ActorDied, match="train-0 died"):
        await stage.publisher.publish(1)
    assert stage.faults == []
    assert stage.methods("inference-0")[-1] == "discard"


@pytest.mark.asyncio
async def test_manifest_that_no_engine_takes_at_the_first_publication_is_the_fault_of_the_set_up(
    config: RunConfig,
) -> None:
    stage = Stage(config, prepare=lambda index, manifest, *_: EngineError("parameter w is unknown"))
    with pytest.raises(EngineError, match="parameter w is unknown"):
        await stage.publisher.publish(0)
    assert stage.faults == []


@pytest.mark.asyncio
async def test_engine_that_joined_gets_the_current_version_and_the_others_are_left_alone(config: RunConfig) -> None:
    stage = Stage(config)
    await stage.publisher.publish(4)
    stage.inference.add(2)
    stage.calls.clear()
    assert set(stage.publisher.serving) == {"inference-0", "inference-1"}
    record = await stage.publisher.bring_up()
    assert record is not None
    assert (record.version, record.engines) == (4, ("inference-2",))
    assert stage.methods("inference-0") == []
    assert set(stage.publisher.serving) == {"inference-0", "inference-1", "inference-2"}
    assert await stage.publisher.bring_up() is None


@pytest.mark.asyncio
async def test_engine_that_joins_during_a_step_gets_its_weights_with_the_publication(config: RunConfig) -> None:
    stage = Stage(config)
    await stage.publisher.publish(4)
    async with stage.publisher.lock:
        stage.inference.add(2)
        joining = asyncio.create_task(stage.publisher.bring_up())
        await asyncio.sleep(0)
        record = await stage.publisher.publish(5)
    assert record.engines == ("inference-0", "inference-1", "inference-2")
    assert await joining is None
    assert stage.methods("inference-2").count("commit") == 1


@pytest.mark.asyncio
async def test_publication_with_no_engine_left_says_so_at_its_deadline(config: RunConfig) -> None:
    stage = Stage(config, num_engines=0)
    with pytest.raises(DeadlineExceeded, match="publication of version 1: no engine is left"):
        await stage.publisher.publish(1)


@pytest.fixture
def stored(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"transfer": TransferConfig(backend="disk")})


PARCEL = Parcel(version=1, fingerprint="", digests=("aa", "bb"), device="", content="folder")


@pytest.mark.asyncio
async def test_stored_route_sends_before_engines_receive_and_is_freed_after_the_commit(stored: RunConfig) -> None:
    received: list[Any] = []

    def receive(index: int, manifest: WeightManifest, parcels: Any, timeout_s: float) -> EngineAck:
        received.append((parcels, timeout_s < stored.driver.deadlines.publication_s))
        return good_ack(index, manifest)

    stage = Stage(stored, parcel=PARCEL, receive=receive)
    await stage.publisher.publish(1)
    assert received == [((PARCEL,), True)] * 2
    assert [call.split(".")[1] for call in stage.calls] == [
        "weight_manifest",
        *["prepare"] * 2,
        "send_weights",
        *["receive"] * 2,
        *["commit"] * 2,
        "release_weights",
    ]


@pytest.mark.asyncio
async def test_engine_that_cannot_fetch_from_a_stored_route_is_to_blame_itself(stored: RunConfig) -> None:
    def receive(index: int, manifest: WeightManifest, *_: Any) -> Any:
        return TransferError("the folder is not mounted") if index == 0 else good_ack(index, manifest)

    stage = Stage(stored, parcel=PARCEL, receive=receive)
    record = await stage.publisher.publish(1)
    assert stage.faults == [("inference-0", FaultCause.FAILED)]
    assert record.engines == ("inference-1",)
    assert stage.methods("train-0").count("release_weights") == 2


@pytest.mark.asyncio
async def test_engine_with_wrong_weights_is_taken_out_and_reported_once(config: RunConfig) -> None:
    stage = Stage(config)
    await stage.publisher.publish(1)

    stage.publisher.quarantine_wrong({"inference-1": "it holds other values", "inference-7": "gone already"})

    assert stage.faults == [("inference-1", FaultCause.WRONG_WEIGHTS)]
    assert set(stage.publisher.serving) == {"inference-0"}
