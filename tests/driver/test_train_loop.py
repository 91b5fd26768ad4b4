"""The train loop where it waits for groups; whole runs are in `test_run.py`."""

from typing import Any

import pytest
from small_runs import small_config

from rayrl.driver.group_buffer import GroupBuffer
from rayrl.driver.progress import Progress
from rayrl.driver.stop_signal import StopSignal
from rayrl.driver.train_loop import TrainLoop
from rayrl.errors import BudgetExhausted, DeadlineExceeded
from rayrl.training.step import LOGPROB_GAP, TrainStepResult, logprob_gap_fault

CONFIG = small_config(driver__deadlines={"generation_s": 0.01})


class IdleRolloutLoop:
    """A rollout loop that has nothing to tell."""

    def status(self) -> dict[str, Any]:
        return {"in_flight": 0}


def train_loop(buffer: GroupBuffer) -> TrainLoop:
    unused: Any = None
    idle: Any = IdleRolloutLoop()
    return TrainLoop(
        config=CONFIG,
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


def result(gap: float | None, reason: str | None = None) -> TrainStepResult:
    metrics = {} if gap is None else {LOGPROB_GAP: gap}
    return TrainStepResult(skipped=reason is not None, reason=reason, metrics=metrics, seconds=0.0, num_tokens=4)


@pytest.mark.parametrize(
    ("total", "num_tokens", "limit", "is_fault"),
    [
        (40.0, 2, 10.0, True),
        (20.0, 2, 10.0, False),
        (1e9, 2, None, False),
        (None, 2, 10.0, False),
        (40.0, 0, 1.0, False),
    ],
)
def test_gap_is_a_fault_beyond_its_limit_per_token(
    total: float | None, num_tokens: int, limit: float | None, is_fault: bool
) -> None:
    metrics = {} if total is None else {LOGPROB_GAP: total}
    assert (logprob_gap_fault(metrics, num_tokens, limit) is not None) == is_fault


@pytest.mark.parametrize(
    ("faulty", "words"),
    [
        (result(None, "gradient norm is nan"), "gradient norm is nan; usually training.optimizer.lr is too high"),
        # Of an engine that cannot leave the update out.
        (result(125.0), "125 nats per token apart.*training.max_logprob_gap=10"),
    ],
)
def test_run_ends_by_name_when_too_many_steps_in_a_row_failed(faulty: TrainStepResult, words: str) -> None:
    loop = train_loop(GroupBuffer())
    for step in range(1, 21):
        loop._note_fault(result(0.2), step)
    for step in range(21, 26):
        loop._note_fault(faulty, step)

    with pytest.raises(BudgetExhausted, match=rf"6 failed training steps .*driver.max_skipped_steps allows 5.*{words}"):
        loop._note_fault(faulty, 26)
