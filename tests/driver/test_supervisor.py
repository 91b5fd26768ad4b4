"""The supervisor over fakes: what it does with a ruling, and what it writes down."""

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import pytest
from small_runs import small_config

from rayrl.config.run import RunConfig
from rayrl.driver.failure_policy import FaultCause
from rayrl.driver.progress import Progress
from rayrl.driver.supervisor import Supervisor
from rayrl.errors import ActorDied, BudgetExhausted, ConfigError, DeadlineExceeded
from rayrl.inference.engine import EngineStatus
from rayrl.inference.lifecycle import EngineState
from rayrl.infra.actor_group import Member
from rayrl.infra.identity import ActorLabel
from rayrl.infra.outcomes import PendingCall


def config(**supervision: Any) -> RunConfig:
    waits = {"backoff_s": 0.0, "heartbeat_s": 0.001, "silence_s": 60.0}
    return small_config(inference__num_engines=2, supervision={**waits, **supervision})


class FakeHandle:
    """An actor whose status can be told to fail, and never answers when it is `silent`."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.is_silent = False
        self.status = self

    def remote(self) -> Any:
        return self._status()

    async def _status(self) -> Any:
        if self.is_silent:
            await asyncio.Event().wait()
        return EngineStatus(
            state=EngineState.RUNNING,
            version=0,
            num_running=0,
            num_waiting=0,
            kv_use=0.0,
            total_requests=0,
            total_tokens=0,
            total_prefill_tokens=0,
            total_steps=0,
            failure=self.failure,
        )


class FakeGroup:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.members: list[Member] = []
        self.deaths: dict[str, asyncio.Future[Any]] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._next = 0
        for _ in range(size):
            self.grow()

    def __len__(self) -> int:
        return len(self.members)

    def grow(self) -> Member:
        name = f"{self.name}-{self._next}"
        member = Member(name=name, index=self._next, handle=FakeHandle(), node="", host="", pid=0)
        self._next += 1
        self.deaths[name] = asyncio.get_running_loop().create_future()
        self.members.append(member)
        return member

    def find(self, name: str) -> Member | None:
        return next((member for member in self.members if member.name == name), None)

    def remove(self, name: str) -> Member | None:
        member = self.find(name)
        if member is not None:
            self.members.remove(member)
        return member

    def kill(self, name: str) -> None:
        self.deaths[name].set_result(ActorDied(f"{name} died of old age"))

    async def until_gone(self, member: Member) -> Any:
        return await self.deaths[member.name]

    def submit(self, method: str, *args: Any, names: Collection[str] | None = None) -> list[PendingCall]:
        async def answer() -> None:
            self.calls.append((method, args))

        return [PendingCall(actor=ActorLabel(name=member.name), ref=answer()) for member in self.members]


class FakeStarter:
    """Starts fake members, unless told to fail first."""

    def __init__(self, role: str, group: FakeGroup) -> None:
        self.role = role
        self.group = group
        self.failures: list[Exception] = []
        self.left: list[str] = []
        self.room = False

    def has_room(self, avoid: Collection[str] = ()) -> bool:
        return self.room

    def leave(self, name: str) -> None:
        self.left.append(name)

    def has_room_elsewhere(self, avoid: Collection[str]) -> bool:
        return self.room

    async def start(self, *, in_bundle: bool = True) -> Member:
        if self.failures:
            raise self.failures.pop(0)
        return self.group.grow()


class FakePublisher:
    def __init__(self, group: FakeGroup) -> None:
        self.version: int | None = 3
        self.group = group
        self.on_fault: Any = None
        self.brought_up = asyncio.Event()
        self.failure: Exception | None = None
        self.has_weights = {member.name for member in group.members}

    @property
    def serving(self) -> dict[str, Any]:
        return {item.name: item.handle for item in self.group.members if item.name in self.has_weights}

    def forget_group(self) -> None: ...

    async def bring_up(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.has_weights |= {member.name for member in self.group.members}
        self.brought_up.set()


class FakeLedger:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def record_event(self, kind: str, step: int, detail: dict[str, Any]) -> None:
        self.events.append((kind, detail))


class Stage:
    def __init__(self, **supervision: Any) -> None:
        self.engines = FakeStarter("inference", FakeGroup("inference", 2))
        self.workers = FakeStarter("rollout", FakeGroup("rollout", 1))
        self.publisher = FakePublisher(self.engines.group)
        self.ledger = FakeLedger()
        self.draining: set[str] = set()
        parts: dict[str, Any] = {
            "engines": self.engines,
            "workers": self.workers,
            "publisher": self.publisher,
            "ledger": self.ledger,
        }
        self.supervisor = Supervisor(
            config=config(**supervision), progress=Progress(), ask_draining=lambda: self.draining, **parts
        )
        self.task = asyncio.create_task(self.supervisor.run())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Give the loop turns until `condition` holds; the suite's limit ends a wait in vain."""
        for _ in range(2000):
            if condition():
                return
            await asyncio.wait([self.task], timeout=0.001)
        raise AssertionError(f"it never came to that; {self.supervisor.status()}; {self.ledger.events}")

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.ledger.events]

    async def close(self) -> None:
        await self.supervisor.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.mark.asyncio
async def test_dead_engine_is_replaced_given_weights_and_connected() -> None:
    stage = Stage()
    await asyncio.sleep(0)
    stage.engines.group.kill("inference-0")
    await stage.until(lambda: "member_serves" in stage.kinds())
    await stage.until(lambda: set(stage.workers.group.calls[-1][1][0]) == {"inference-1", "inference-2"})
    await stage.close()
    assert stage.kinds() == ["engine_lost", "member_started", "member_serves"]
    assert stage.ledger.events[0][1]["engine"] == "inference-0"
    assert stage.ledger.events[0][1]["cause"] == "DIED"
    assert stage.engines.left == ["inference-0"]
    metrics = stage.supervisor.metrics()
    assert (metrics["supervision/inference_faults"], metrics["supervision/inference_replaced"]) == (1, 1)
    assert metrics["supervision/engines_serving"] == 2


@pytest.mark.asyncio
async def test_run_goes_on_when_a_new_engine_gets_no_weights_since_the_trainer_died() -> None:
    stage = Stage()
    told: list[Exception] = []
    stage.supervisor.on_push_failed = told.append
    stage.publisher.failure = ActorDied("train-0 died")
    await asyncio.sleep(0)
    stage.engines.group.kill("inference-0")
    await stage.until(lambda: bool(told))
    await stage.until(lambda: bool(stage.workers.group.calls))
    assert told == [stage.publisher.failure]
    assert stage.kinds() == ["engine_lost", "member_started"]
    await stage.close()


@pytest.mark.asyncio
async def test_dead_rollout_worker_is_replaced_and_connected_to_the_engines() -> None:
    stage = Stage()
    await asyncio.sleep(0)
    stage.workers.group.kill("rollout-0")
    await stage.until(lambda: bool(stage.workers.group.calls))
    await stage.close()
    assert stage.kinds() == ["worker_lost", "member_started"]
    assert [member.name for member in stage.workers.group.members] == ["rollout-1"]
    assert set(stage.workers.group.calls[-1][1][0]) == {"inference-0", "inference-1"}


@pytest.mark.asyncio
async def test_member_that_two_notice_is_reported_once() -> None:
    stage = Stage()
    await asyncio.sleep(0)
    stage.supervisor.report("inference-0", FaultCause.WRONG_WEIGHTS, "bucket 3 differs")
    stage.supervisor.report("inference-0", FaultCause.DIED, "gone")
    await stage.until(lambda: "member_serves" in stage.kinds())
    await stage.close()
    assert stage.kinds().count("engine_lost") == 1
    assert stage.ledger.events[0][1]["cause"] == "WRONG_WEIGHTS"


@pytest.mark.asyncio
async def test_engine_that_says_it_failed_is_replaced() -> None:
    stage = Stage()
    stage.engines.group.members[1].handle.failure = "RuntimeError: out of memory"
    await stage.until(lambda: "engine_lost" in stage.kinds())
    await stage.close()
    detail = stage.ledger.events[0][1]
    assert (detail["engine"], detail["cause"], detail["detail"]) == (
        "inference-1",
        "FAILED",
        "RuntimeError: out of memory",
    )


@pytest.mark.asyncio
async def test_engine_that_does_not_answer_is_replaced_after_its_limit() -> None:
    stage = Stage(silence_s=0.02)
    stage.engines.group.members[0].handle.is_silent = True
    await stage.until(lambda: "engine_lost" in stage.kinds())
    await stage.close()
    detail = stage.ledger.events[0][1]
    assert (detail["engine"], detail["cause"]) == ("inference-0", "SILENT")
    assert "supervision.silence_s=0.02" in detail["detail"]


@pytest.mark.asyncio
async def test_replacement_that_does_not_start_is_tried_again() -> None:
    stage = Stage()
    stage.engines.failures = [DeadlineExceeded("start of inference-2: no room")]
    await asyncio.sleep(0)
    stage.engines.group.kill("inference-0")
    await stage.until(lambda: "member_serves" in stage.kinds())
    await stage.close()
    assert [detail["cause"] for kind, detail in stage.ledger.events if kind == "engine_lost"] == [
        "DIED",
        "NOT_STARTED",
    ]


@pytest.mark.asyncio
async def test_run_goes_on_without_an_engine_when_the_budget_is_used_up_and_enough_are_left() -> None:
    stage = Stage(restarts=0)
    await asyncio.sleep(0)
    stage.engines.room = True
    stage.engines.group.kill("inference-0")
    await stage.until(lambda: bool(stage.workers.group.calls))
    await stage.supervisor._fit_to_target()
    assert not stage.task.done()
    await stage.close()
    assert stage.kinds() == ["engine_lost"], "what may not be replaced must not come back as a new engine"
    assert stage.ledger.events[0][1]["decision"] == "GO_ON_WITHOUT"


@pytest.mark.asyncio
async def test_run_ends_with_the_cause_when_the_budget_is_used_up_and_too_few_are_left() -> None:
    stage = Stage(restarts=0, min_engines=2)
    await asyncio.sleep(0)
    stage.engines.group.kill("inference-1")
    with pytest.raises(BudgetExhausted, match=r"inference-1 is lost: .*2 are needed; inference-1 died of old age"):
        await stage.task
    await stage.close()


@pytest.mark.asyncio
async def test_engines_leave_and_join_when_the_target_changes() -> None:
    stage = Stage(max_engines=3)
    stage.engines.room = True
    await stage.until(lambda: len(stage.publisher.serving) == 3)
    stage.supervisor.scale_inference(1)
    await stage.until(lambda: len(stage.engines.group) == 1)
    stage.supervisor.scale_inference(2)
    await stage.until(lambda: len(stage.publisher.serving) == 2)
    await stage.close()
    assert stage.kinds().count("engine_removed") == 2
    assert [member.name for member in stage.engines.group.members] == ["inference-0", "inference-3"]


@pytest.mark.asyncio
async def test_engine_of_a_draining_node_leaves_once_its_successor_serves() -> None:
    stage = Stage()
    stage.engines.room = stage.workers.room = True
    first = stage.engines.group.members[0]
    stage.engines.group.members[0] = dataclasses.replace(first, node="n1")
    stage.draining = {"n1"}
    await stage.until(lambda: "engine_removed" in stage.kinds())
    await stage.close()
    assert stage.kinds() == ["member_started", "member_serves", "engine_removed"]
    assert [member.name for member in stage.engines.group.members] == ["inference-1", "inference-2"]


@pytest.mark.asyncio
@pytest.mark.parametrize("target", [0, 4])
async def test_target_outside_the_limits_is_refused_with_both(target: int) -> None:
    stage = Stage(max_engines=3)
    with pytest.raises(ConfigError, match=r"min_engines=1, supervision.max_engines=3"):
        stage.supervisor.scale_inference(target)
    await stage.close()
