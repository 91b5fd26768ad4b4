"""What counts as the loss of a training worker, and which finished groups survive it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from groups import buffered
from small_runs import small_config

from rayrl.checkpoint.ledger_events import TRAINING_REBUILT
from rayrl.config.run import RunConfig
from rayrl.driver.group_buffer import BufferedGroup, GroupBuffer
from rayrl.driver.progress import Progress
from rayrl.driver.publisher import PublicationRecord
from rayrl.driver.train_recovery import GroupHealth, TrainRecovery, is_training_fault, sort_out
from rayrl.errors import (
    ActorDied,
    ActorError,
    BudgetExhausted,
    CheckpointError,
    DeadlineExceeded,
    EngineError,
    RayrlError,
    TransferError,
)


@pytest.mark.parametrize(
    ("error", "health", "expected"),
    [
        (ActorDied("train-1 died"), GroupHealth.DEAD, True),
        (TransferError("the sender left"), GroupHealth.DEAD, True),
        (CheckpointError("connection closed by peer"), GroupHealth.DEAD, True),
        (ActorError("train-0: connection closed"), GroupHealth.SILENT, True),
        (DeadlineExceeded("step_s"), GroupHealth.SILENT, False),
        (ActorError("train-0: gloo: connection reset"), GroupHealth.ALIVE, True),
        (ActorDied("rollout has no members left"), GroupHealth.ALIVE, False),
        (EngineError("this worker has no algorithm"), GroupHealth.ALIVE, False),
        (CheckpointError("No space left on device"), GroupHealth.ALIVE, False),
        (DeadlineExceeded("publication_s"), GroupHealth.ALIVE, False),
    ],
)
def test_new_training_group_is_made_only_when_it_can_help(
    error: RayrlError, health: GroupHealth, expected: bool
) -> None:
    assert is_training_fault(error, health) is expected


def test_group_is_kept_when_all_its_versions_still_exist_and_lost_otherwise() -> None:
    groups = [buffered(1, oldest=2), buffered(2, oldest=2, newest=3), buffered(3, oldest=3), buffered(4, oldest=0)]
    remains = sort_out(groups, version=2)
    assert [group.ticket for group in remains.kept] == [1, 4]
    assert [group.ticket for group in remains.lost] == [2, 3]


class Stage:
    """A recovery over fakes; the new training groups fail as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: list[RayrlError], restarts: int = 3) -> None:
        self.failures = failures
        self.calls: list[str] = []
        self.restored_with: list[list[int]] = []
        self.buffer = GroupBuffer()
        self.progress = Progress()
        self.progress.restore(step=3, version=3, consumed=6, outstanding=3)
        self.lock = asyncio.Lock()
        self.members = ("train-0",)
        unused: Any = self
        config = small_config(driver__num_steps=9, supervision={"restarts": restarts, "backoff_s": 0.0})
        self.recovery = TrainRecovery(
            config=config,
            fleet=unused,
            publisher=unused,
            checkpointer=unused,
            evaluator=unused,
            rollout_loop=unused,
            buffer=self.buffer,
            progress=self.progress,
            ledger=unused,
        )
        self.train = self
        self.reservation = None
        monkeypatch.setattr("rayrl.driver.train_recovery.start_training_group", self._start_group)

    async def _start_group(self, config: RunConfig, reservation: Any) -> None:
        self.calls.append("start")

    async def call_all(self, method: str, *, seconds: float, phase: str) -> None:
        raise ActorDied(f"{phase}: train-0 died")

    async def hold(self) -> int:
        return 2 if "start" not in self.calls else 0

    async def close(self) -> None: ...

    async def shutdown(self, seconds: float) -> None: ...

    def take_over(self, group: Any) -> None: ...

    def renew_trainer(self, group: Any) -> None: ...

    async def newest(self) -> None: ...

    async def restore_or_restart(self, checkpoint: None, *, held: Sequence[BufferedGroup]) -> None:
        self.restored_with.append([group.ticket for group in self.buffer.in_order()])
        assert [group.ticket for group in held] == self.restored_with[-1]
        self.progress.restore(step=0, version=0, consumed=0, outstanding=len(held))

    async def publish(self, version: int) -> PublicationRecord:
        if self.failures:
            raise self.failures.pop(0)
        self.calls.append("publish")
        return PublicationRecord(
            version=version, digest="", acknowledged={"inference-0": ""}, num_bytes=0, transfer_s=0.0, commit_s=0.0
        )

    def record_publication(self, *args: Any, **more: Any) -> None: ...

    def record_event(self, kind: str, *, step: int, detail: dict[str, Any]) -> None:
        self.calls.append(kind)

    def go_on(self) -> None:
        self.calls.append("go_on")


@pytest.mark.asyncio
async def test_recovery_begins_again_when_a_rank_of_the_new_group_dies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, [ActorDied("train-0 died in the publication")])
    stage.buffer.put(buffered(7, oldest=0))
    taken = [buffered(4, oldest=0), buffered(5, oldest=2)]
    await stage.recovery.recover(ActorDied("train-0 died"), taken)
    assert stage.calls == ["start", "start", "publish", TRAINING_REBUILT, "go_on"]
    assert stage.restored_with == [[4, 7], [4, 7]], "groups out of the buffer come back once"
    metrics = stage.recovery.metrics()
    assert metrics["supervision/train_rebuilt"] == 1
    assert metrics["supervision/train_steps_undone"] == 3
    assert metrics["supervision/train_groups_lost"] == 2 + 1, "two in flight, one of a version that is gone"


@pytest.mark.asyncio
async def test_recovery_ends_with_the_cause_when_new_groups_die_more_often_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, [ActorDied("again"), ActorDied("and again")], restarts=2)
    with pytest.raises(BudgetExhausted, match=r"training group is lost.*supervision\.restarts=2.*and again"):
        await stage.recovery.recover(ActorDied("train-0 died"), ())
    assert stage.calls == ["start", "start"]
