"""What counts as the loss of a training worker, and which finished groups survive it."""

import pytest
from groups import buffered

from rayrl.driver.train_recovery import GroupHealth, is_training_fault, sort_out
from rayrl.errors import (
    ActorDied,
    ActorError,
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
