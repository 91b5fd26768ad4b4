"""Supervision of inference engines and rollout workers: notice, decide, replace.

    until_gone, heartbeats ──┐
    publisher.on_fault ──────┼──> report ──decide──> replace: start ─> weights ─> connect
    rollout_loop.on_fault ───┘                 └───> go on without it, or end the run

    task               waits for                        unblocked by                       bounded by
    watch of a member  its end                          its death, `close`                 nothing: it lasts as long
    pulse of a member  the next heartbeat, its answer   the clock, the member              supervision.silence_s
    replacement        the pause, start, the lock       Ray, a step or a publication       start_s, publication_s
    scaling            the next look at the cluster     the clock                          -
    `run`              a ruling to stop the run         `report`                           nothing: it is cancelled

The policy is in `failure_policy.py`; here its rulings are carried out, and written to log, ledger and metrics.
A member is reported once: whoever notices second finds it gone. `close` ends all tasks before the actors are asked
to leave, so that an orderly end is no fault.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from rayrl.checkpoint.ledger import Ledger
from rayrl.config.run import RunConfig
from rayrl.driver.engine_metrics import engine_metrics
from rayrl.driver.failure_policy import (
    Decision,
    FaultCause,
    RestartHistory,
    RestartLimits,
    decide,
)
from rayrl.driver.member_starter import MemberStarter
from rayrl.driver.progress import Progress
from rayrl.driver.publisher import Publisher
from rayrl.driver.pulse import Pulse
from rayrl.errors import BudgetExhausted, ConfigError, RayrlError
from rayrl.inference.engine import EngineStatus
from rayrl.infra.actor_group import Member
from rayrl.infra.nodes import draining_nodes, is_node_alive
from rayrl.infra.outcomes import CallState, gather_outcomes
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.supervisor")
_SCALE_S = 5.0
"""Between two looks at the cluster for room."""
_CONNECT_GRACE_S = 5.0
INFERENCE = "inference"
ROLLOUT = "rollout"


class _Role:
    """What the supervisor knows about one role."""

    def __init__(self, noun: str, starter: MemberStarter, limits: RestartLimits) -> None:
        self.noun = noun
        """In the kinds of events; the audit reads that an engine left from those that begin with `engine_`."""
        self.starter = starter
        self.limits = limits
        self.history = RestartHistory()
        self.tasks: dict[str, list[asyncio.Task[None]]] = {}
        self.num_starting = 0
        self.num_faults = 0
        self.num_replaced = 0


class Supervisor:
    """Keeps the engines and the rollout workers of a run alive."""

    def __init__(
        self,
        *,
        config: RunConfig,
        engines: MemberStarter,
        workers: MemberStarter,
        publisher: Publisher,
        progress: Progress,
        ledger: Ledger,
        ask_draining: Callable[[], Collection[str]] = draining_nodes,
    ) -> None:
        """`ask_draining` returns the ids of nodes that are about to be taken away."""
        self._ask_draining = ask_draining
        self._config = config
        self._publisher = publisher
        self._progress = progress
        self._ledger = ledger
        supervision = config.supervision
        self.on_push_failed: Callable[[RayrlError], None] = self._end
        """Told why a new engine got no weights where that was the trainer's fault."""
        self.on_node_lost: Callable[[str], None] | None = None
        """Told the id of a node that is gone, when a rollout worker went with it."""
        self._roles = {
            INFERENCE: _Role("engine", engines, _limits(config, supervision.min_engines)),
            ROLLOUT: _Role("worker", workers, _limits(config, 1)),
        }
        self._target = supervision.max_engines or config.inference.num_engines
        self._leaving: set[str] = set()
        self._statuses: dict[str, EngineStatus] = {}
        """The last answer of each engine, at most `supervision.heartbeat_s` old while it answers."""
        self._load: dict[str, float] = {}
        self._load_at = time.monotonic()
        self._jobs: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] | None = None
        self._connecting = asyncio.Lock()
        publisher.on_fault = self.report

    async def run(self) -> None:
        """Watch all members until cancelled. BudgetExhausted if too few are left and none may be replaced."""
        self._ended = asyncio.get_running_loop().create_future()
        for role in self._roles.values():
            for member in role.starter.group.members:
                self._watch(role, member)
        self._spawn(self._scale)
        await self._ended

    async def close(self) -> None:
        """Stop watching; members are left as they are."""
        tasks = [*self._jobs, *(task for role in self._roles.values() for item in role.tasks.values() for task in item)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def report(self, name: str, cause: FaultCause, reason: str) -> None:
        """Take a member that failed out of its group and do what the policy says. One that is known is ignored."""
        role = self._roles[INFERENCE if name.startswith(f"{INFERENCE}-") else ROLLOUT]
        if name not in role.tasks:
            return
        for task in role.tasks.pop(name):
            if task is not asyncio.current_task():
                task.cancel()
        member = role.starter.group.remove(name)
        role.starter.leave(name)
        if role.starter.role == INFERENCE:
            self._publisher.forget_group()
            self._spawn(self._connect)
        elif member is not None:
            self._spawn(self._look_for_node, member.node)
        self._rule(role, name, cause, reason)

    def scale_inference(self, num_engines: int) -> None:
        """Have this many engines from now on. ConfigError outside min_engines and max_engines."""
        supervision = self._config.supervision
        most = supervision.max_engines or self._config.inference.num_engines
        if not supervision.min_engines <= num_engines <= most:
            raise ConfigError(
                f"cannot scale to {num_engines} engines: supervision.min_engines={supervision.min_engines}, "
                f"supervision.max_engines={most}"
            )
        self._record("scale", {"from": self._target, "to": num_engines})
        self._target = num_engines
        self._spawn(self._fit_to_target)

    def metrics(self) -> dict[str, float]:
        """Return the load of the engines, and the counts of now and since the start. Called once per step."""
        engines = self._roles[INFERENCE]
        result = {
            "supervision/engines_serving": float(len(self._publisher.serving)),
            "supervision/engines_starting": float(engines.num_starting),
        }
        members = {member.name for member in engines.starter.group.members}
        statuses = [status for name, status in self._statuses.items() if name in members]
        now = time.monotonic()
        self._load = engine_metrics(statuses, self._load, now - self._load_at)
        self._load_at = now
        result |= self._load
        for name, role in self._roles.items():
            result[f"supervision/{name}_faults"] = float(role.num_faults)
            result[f"supervision/{name}_replaced"] = float(role.num_replaced)
        return result

    def status(self) -> dict[str, Any]:
        """Return what is supervised, for status and the watchdog."""
        return {
            name: {
                "members": {member.name: member.pid for member in role.starter.group.members},
                "starting": role.num_starting,
                "faults": role.num_faults,
                "replaced": role.num_replaced,
            }
            for name, role in self._roles.items()
        }

    def _rule(self, role: _Role, name: str, cause: FaultCause, reason: str) -> None:
        now = time.monotonic()
        role.num_faults += 1
        ruling = decide(
            cause,
            role=role.starter.role,
            num_live=len(role.starter.group) + role.num_starting,
            history=role.history,
            limits=role.limits,
            now=now,
        )
        _LOGGER.warning("%s is lost, %s: %s\n%s", name, ruling.decision.name, ruling.reason, reason)
        self._record(
            f"{role.noun}_lost",
            {
                role.noun: name,
                "cause": cause.name,
                "detail": reason.splitlines()[0] if reason else "",
                "decision": ruling.decision.name,
                "reason": ruling.reason,
            },
        )
        if ruling.decision is Decision.STOP_RUN:
            self._end(BudgetExhausted(f"{name} is lost: {ruling.reason}; {reason}"))
        elif ruling.decision is Decision.REPLACE:
            role.history = role.history.add(now, role.limits.window_s)
            role.num_starting += 1
            self._spawn(self._start, role, name, ruling.pause_s)

    async def _start(self, role: _Role, predecessor: str | None, pause_s: float, in_bundle: bool = True) -> None:
        """Start a member, counted in `num_starting` by the caller, and bring it in."""
        try:
            await asyncio.sleep(pause_s)
            start = time.monotonic()
            member = await role.starter.start(in_bundle=in_bundle)
        except RayrlError as error:
            role.num_starting -= 1
            self._rule(role, f"a new member of {role.starter.role}", FaultCause.NOT_STARTED, str(error))
            return
        except BaseException:
            role.num_starting -= 1
            raise
        role.num_starting -= 1
        role.num_replaced += predecessor is not None
        seconds = time.monotonic() - start
        self._watch(role, member)
        _LOGGER.info("%s is ready after %.1f s, in place of %s", member.name, seconds, predecessor or "nobody")
        detail = {"member": member.name, "in_place_of": predecessor, "start_s": seconds}
        self._record("member_started", detail)
        if role.starter.role == INFERENCE:
            await self._bring_up(member)
        await self._connect()

    async def _bring_up(self, member: Member) -> None:
        start = time.monotonic()
        try:
            record = await self._publisher.bring_up()
        except RayrlError as error:
            # The trainer is at fault: the train loop, which can renew it, is told. The engine gets the next version.
            _LOGGER.warning("%s has no weights yet: %s", member.name, error)
            self.on_push_failed(error)
            return
        if record is not None:
            self._ledger.record_publication(record.published, step=self._progress.step)
        version = self._publisher.version
        serves = member.name in self._publisher.serving
        if serves:
            self._record("member_serves", {"member": member.name, "version": version})
            _LOGGER.info("%s serves version %s after %.1f s", member.name, version, time.monotonic() - start)

    async def _connect(self) -> None:
        """Tell all rollout workers which engines serve. A worker that cannot be told is noticed by its watch."""
        async with self._connecting:
            calls = self._roles[ROLLOUT].starter.group.submit("connect", self._publisher.serving)
            outcomes = await gather_outcomes(
                calls,
                seconds=self._config.supervision.silence_s,
                grace_s=_CONNECT_GRACE_S,
                phase="connecting rollout to engines",
            )
            for outcome in outcomes:
                if outcome.state is not CallState.DONE:
                    _LOGGER.warning("%s was not connected to the engines: %s", outcome.member, outcome.error)

    async def _look_for_node(self, node: str) -> None:
        """Tell what lay on a node, if that is gone."""
        if self.on_node_lost is not None and not await asyncio.to_thread(is_node_alive, node):
            self.on_node_lost(node)

    def _watch(self, role: _Role, member: Member) -> None:
        loop = asyncio.get_running_loop()
        role.tasks[member.name] = [
            loop.create_task(self._guard(self._await_end, role, member)),
            loop.create_task(self._guard(self._feel, role, member)),
        ]

    async def _await_end(self, role: _Role, member: Member) -> None:
        error = await role.starter.group.until_gone(member)
        if error is not None:
            self.report(member.name, FaultCause.DIED, str(error))

    async def _feel(self, role: _Role, member: Member) -> None:
        def keep(status: EngineStatus) -> None:
            self._statuses[member.name] = status

        fault = await Pulse(member, self._config.supervision, keep).until_fault()
        self.report(member.name, *fault)

    async def _scale(self) -> None:
        while True:
            nodes = await asyncio.to_thread(self._ask_draining)
            for role in self._roles.values():
                await self._leave_nodes(role, nodes)
            await self._fit_to_target()
            await asyncio.sleep(_SCALE_S)

    async def _leave_nodes(self, role: _Role, nodes: Collection[str]) -> None:
        """Replace members on nodes that are being drained, if others have room; else their death is waited for."""
        for member in role.starter.group.members:
            if member.node not in nodes or member.name in self._leaving:
                continue
            if await asyncio.to_thread(role.starter.has_room_elsewhere, nodes):
                self._leaving.add(member.name)
                role.num_starting += 1
                self._spawn(self._move, role, member)

    async def _move(self, role: _Role, member: Member) -> None:
        """Start a successor outside of the member's bundle, and let the member go once it works."""
        num_replaced = role.num_replaced
        await self._start(role, member.name, 0.0, in_bundle=False)
        if role.num_replaced > num_replaced and member.name in role.tasks:
            self._let_go(role, member, "its node is being drained")

    async def _fit_to_target(self) -> None:
        """Take out the youngest engines beyond the target; add one if the cluster has room."""
        role = self._roles[INFERENCE]
        group = role.starter.group
        staying = [member for member in group.members if member.name not in self._leaving]
        for member in staying[self._target :]:
            self._let_go(role, member, "more engines than the target")
        missing = self._target - len(group) - role.num_starting
        used_up = role.history.within(role.limits.window_s, time.monotonic()) >= role.limits.restarts
        # An engine that may not be replaced must not come back as a new one.
        if missing <= 0 or (used_up and role.num_faults > 0) or self._publisher.version is None:
            return
        if await asyncio.to_thread(role.starter.has_room):
            role.num_starting += 1
            self._spawn(self._start, role, None, 0.0)

    def _let_go(self, role: _Role, member: Member, reason: str) -> None:
        for task in role.tasks.pop(member.name, []):
            task.cancel()
        role.starter.group.remove(member.name)
        role.starter.leave(member.name)
        self._publisher.forget_group()
        self._record(f"{role.noun}_removed", {role.noun: member.name, "reason": reason})
        _LOGGER.info("%s leaves: %s", member.name, reason)
        self._spawn(self._connect)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        job = asyncio.get_running_loop().create_task(self._guard(work, *args))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _guard(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Let what ends a task end the run: a supervisor that fails silently supervises nothing."""
        try:
            await work(*args)
        except Exception as error:  # noqa: BLE001 - handed to `run`, which raises it
            self._end(error)

    def _end(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _record(self, kind: str, detail: dict[str, Any]) -> None:
        self._ledger.record_event(kind, step=self._progress.step, detail=detail)


def _limits(config: RunConfig, min_members: int) -> RestartLimits:
    supervision = config.supervision
    return RestartLimits(
        restarts=supervision.restarts,
        window_s=supervision.window_s,
        backoff_s=supervision.backoff_s,
        max_backoff_s=supervision.max_backoff_s,
        min_members=min_members,
    )
