"""The train loop where it waits for groups; whole runs are in `test_run.py`."""

from typing import Any

import pytest

from rayrl.config.loader import parse_section
from rayrl.config.run import RunConfig
from rayrl.driver.group_buffer import GroupBuffer
from rayrl.driver.progress import Progress
from rayrl.driver.stop_signal import StopSignal
from rayrl.driver.train_loop import TrainLoop
from rayrl.errors import DeadlineExceeded

CONFIG = {
    "run": {"name": "small"},
    "model": {"path": "model"},
    "dataset": {"type": "arithmetic"},
    "reward": {"type": "exact_match"},
    "rollout": {"workflow": {"type": "single_turn"}, "group_size": 2, "sampling": {"max_new_tokens": 4}},
    "driver": {"groups_per_step": 2, "num_steps": 1, "deadlines": {"generation_s": 0.01}},
    "training": {"optimizer": {"lr": 1e-3}},
    "inference": {"engine": {"type": "scripted"}},
}


class IdleRolloutLoop:
    """A rollout loop that has nothing to tell."""

    def status(self) -> dict[str, Any]:
        return {"in_flight": 0}


def train_loop(buffer: GroupBuffer) -> TrainLoop:
    unused: Any = None
    idle: Any = IdleRolloutLoop()
    return TrainLoop(
        config=parse_section(RunConfig, CONFIG),
        train=unused,
        buffer=buffer,
        progress=Progress(),
        outcomes=unused,
        ledger=unused,
        publisher=unused,
        evaluator=unused,
        checkpointer=unused,
        rollout_loop=idle,
        rollout_log=unused,
        tracker=unused,
        stop=StopSignal(),
        recovery=unused,
    )


@pytest.mark.asyncio
async def test_deadline_of_the_rollout_loop_is_raised_as_it_is() -> None:
    buffer = GroupBuffer()
    buffer.fail(DeadlineExceeded("rollout-0 did not answer for 62 s"))
    with pytest.raises(DeadlineExceeded, match=r"^rollout-0 did not answer for 62 s$"):
        await train_loop(buffer)._next_batch()


@pytest.mark.asyncio
async def test_wait_without_groups_ends_with_its_setting_and_the_counts() -> None:
    with pytest.raises(DeadlineExceeded, match=r"driver\.deadlines\.generation_s=0\.01.*in_flight.*outstanding=0"):
        await train_loop(GroupBuffer())._next_batch()
