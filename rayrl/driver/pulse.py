"""The heartbeats of one member: at most one question is open at a time; the judgement is pure (`failure_policy`)."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from rayrl.config.supervision import SupervisionConfig
from rayrl.driver.failure_policy import FaultCause, Health, Heartbeat, judge_health
from rayrl.inference.engine import EngineStatus
from rayrl.inference.lifecycle import EngineState
from rayrl.infra.actor_group import Member
from rayrl.infra.waiting import start_waiting


class Pulse:
    """Asks a member for its status every `supervision.heartbeat_s`."""

    def __init__(
        self, member: Member, limits: SupervisionConfig, on_status: Callable[[EngineStatus], None] | None = None
    ) -> None:
        """`on_status` is given each status of an engine."""
        self._member = member
        self._limits = limits
        self._on_status = on_status

    async def until_fault(self) -> tuple[FaultCause, str]:
        """Return what is wrong with the member, once something is; a dead one is left to whoever awaits its end."""
        limits = self._limits
        now = time.monotonic()
        health = Health(answered_at=now, moved_at=now)
        question: asyncio.Future[Any] | None = None
        while True:
            if question is None:
                question = start_waiting(self._member.handle.status.remote())
            await asyncio.wait([question], timeout=limits.heartbeat_s)
            beat = Heartbeat(answered=False)
            if question.done():
                beat = read_answer(question)
                if self._on_status is not None and beat.answered and isinstance(question.result(), EngineStatus):
                    self._on_status(question.result())
                question = None
            now = time.monotonic()
            health = health.after(beat, now)
            fault = judge_health(health, now=now, silence_s=limits.silence_s, stall_s=limits.stall_s)
            if fault is not None:
                return fault
            if question is None:
                await asyncio.sleep(limits.heartbeat_s)


def read_answer(question: "asyncio.Future[Any]") -> Heartbeat:
    """Return the heartbeat of an answer: that of an engine, or the counts of a rollout worker."""
    error = question.exception()
    if isinstance(error, RayError):
        return Heartbeat(answered=False)
    if error is not None:
        raise error
    status = question.result()
    if isinstance(status, EngineStatus):
        is_paused = status.state is EngineState.PAUSED
        return Heartbeat(
            answered=True,
            has_work=not is_paused and status.num_running + status.num_waiting > 0,
            progress=status.total_tokens + status.total_prefill_tokens + status.total_steps,
            failure=status.failure,
        )
    # Episodes have their own deadlines, so a rollout worker that answers is well.
    return Heartbeat(answered=True)
