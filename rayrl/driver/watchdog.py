"""The watchdog: if no step completes for `debug.stall_s`, one report on what everything waits for, then the action.

    train loop ──step──> progress <──looks every second── watchdog ──asks all actors, each with a limit──> report

It waits for nothing that could hang: every question has a deadline, and stacks are taken by a signal from outside. One
report is made for a stall; after the next step it is armed again. With `on_stall: stop` the train loop is cancelled and
the run ends with the cause.
"""

import asyncio
import math
import os
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayrl.audit.live_status import STATUS_FILE, LiveStatus, write_status
from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import STALLED
from rayrl.config.run import RunConfig
from rayrl.driver.group_buffer import GroupBuffer
from rayrl.driver.progress import Progress
from rayrl.driver.rollout_loop import RolloutLoop
from rayrl.driver.stall_report import StallObservation, name_cause, report_text
from rayrl.errors import RayrlError, StallError
from rayrl.infra.actor_group import ActorGroup, Member
from rayrl.infra.collective_report import report_collectives
from rayrl.infra.stack_dump import dump_stacks
from rayrl.infra.waiting import wait_for
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.watchdog")
_QUESTION_S = 5.0
_STATUS_S = 5.0
_STACK_S = 30.0


class Watchdog:
    """Watches the train loop of one run."""

    def __init__(
        self,
        *,
        config: RunConfig,
        progress: Progress,
        buffer: GroupBuffer,
        phase: Callable[[], str],
        rollout_loop: RolloutLoop,
        groups: Callable[[], list[ActorGroup]],
        ledger: Ledger,
        logs: Path,
    ) -> None:
        """`phase` tells what the train loop does; `groups` are all actors, engines and rollout workers among them."""
        self._config = config
        self._progress = progress
        self._buffer = buffer
        self._phase = phase
        self._rollout_loop = rollout_loop
        self._groups = groups
        self._ledger = ledger
        self._logs = logs
        self._num_reports = 0
        self._phase_seen = ("", time.monotonic())

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Await the train loop and watch it meanwhile. StallError if it stalls and `debug.on_stall` is `stop`."""
        loop = asyncio.get_running_loop()
        task, watch = loop.create_task(work), loop.create_task(self._watch())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                watch.result()
            await task
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            # What is left of a run that ended well would tell the doctor of a step that it is no longer in.
            (self._logs / STATUS_FILE).unlink(missing_ok=True)
        finally:
            for item in (task, watch):
                item.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _watch(self) -> None:
        """Look once a second until the run is to be stopped."""
        stall_s = self._config.debug.stall_s
        step, since, reported, told = self._progress.step, time.monotonic(), False, -math.inf
        while True:
            await asyncio.sleep(min(1.0, stall_s / 4))
            now = time.monotonic()
            if self._phase() != self._phase_seen[0]:
                self._phase_seen = (self._phase(), now)
            if self._progress.step != step:
                step, since, reported = self._progress.step, now, False
            if now - told >= _STATUS_S:
                told = now
                await self._tell(now - since)
            if now - since < stall_s:
                continue
            if not reported:
                reported = True
                cause, path = await self._report(now - since)
                if self._config.debug.on_stall == "stop":
                    raise StallError(
                        f"no step has finished for debug.stall_s={stall_s:g} s; {cause}; stacks and states: {path}"
                    )

    async def _tell(self, step_s: float) -> None:
        """Leave a status for whoever looks from outside."""
        here = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        status = LiveStatus(
            time=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
            step=self._progress.step,
            step_s=step_s,
            phase=self._phase(),
            phase_s=time.monotonic() - self._phase_seen[1],
            buffered=len(self._buffer),
            needed=self._config.driver.groups_per_step,
            rollout=self._rollout_loop.status(),
            actors={
                member.name: {"pid": member.pid, "host": member.host, "is_here": member.node == here}
                for group in self._groups()
                for member in group.members
            },
        )
        try:
            await asyncio.to_thread(write_status, self._logs, status)
        except OSError as error:
            _LOGGER.debug("no status was written: %s", error)

    async def _report(self, stalled_s: float) -> tuple[str, Path]:
        seen = await self.observe(stalled_s)
        cause = name_cause(seen)
        self._num_reports += 1
        path = self._logs / f"stall_{self._num_reports}.txt"
        _LOGGER.error("no step has finished for %.0f s: %s; stacks and states: %s", stalled_s, cause, path)
        try:
            await asyncio.to_thread(path.write_text, report_text(seen, cause), encoding="utf-8")
            self._ledger.record_event(STALLED, self._progress.step, {"cause": cause, "report": path.name})
        except (OSError, RayrlError) as error:
            _LOGGER.warning("the report of the stall could not be kept: %s", error)
        return cause, path

    async def observe(self, stalled_s: float) -> StallObservation:
        """Ask everybody, each for a few seconds."""
        groups = {group.name: group for group in self._groups()}
        answers: dict[str, dict[str, Any]] = {"inference": {}, "rollout": {}}
        for name, found in answers.items():
            members = groups[name].members if name in groups else ()
            statuses = await asyncio.gather(*(_status(member) for member in members))
            found.update({member.name: status for member, status in zip(members, statuses, strict=True)})
        everyone = [member for group in groups.values() for member in group.members]
        stacks = await asyncio.gather(*(asyncio.to_thread(_stacks, member) for member in everyone))
        return StallObservation(
            step=self._progress.step,
            stalled_s=stalled_s,
            phase=self._phase(),
            phase_s=time.monotonic() - self._phase_seen[1],
            needed=self._config.driver.groups_per_step,
            buffered=len(self._buffer),
            rollout=self._rollout_loop.status(),
            engines=answers["inference"],
            queue_limit=self._config.inference.max_queued_requests,
            workers=answers["rollout"],
            collectives=await asyncio.to_thread(report_collectives, self._logs),
            stacks={member.name: text for member, text in zip(everyone, stacks, strict=True)},
        )


async def _status(member: Member) -> Any:
    """Return the status of an actor, or why there is none."""
    try:
        return await wait_for(
            member.handle.status.remote(), seconds=_QUESTION_S, phase="watchdog", actor=member.label, what="status()"
        )
    except RayrlError as error:
        return str(error).splitlines()[0]


def _stacks(member: Member) -> str:
    """Return the stacks of an actor, taken on its own node."""
    if not member.node or member.node == ray.get_runtime_context().get_node_id():
        return dump_stacks(member.pid)
    where = NodeAffinitySchedulingStrategy(member.node, soft=False)
    ask = ray.remote(dump_stacks).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
    try:
        text: str = ray.get(ask.remote(member.pid), timeout=_STACK_S)
    except ray.exceptions.RayError as error:
        return f"its node cannot be asked: {str(error).splitlines()[0]}"
    return text
