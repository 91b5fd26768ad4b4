"""The rollout loop: prompts get slots, rollout workers make groups of them, the buffer takes the groups.

    prompt stream --slot--> rollout worker (run_group) --summary + reference--> group buffer --> train loop

    task          waits for                          unblocked by
    admission     capacity                           progress.changed: a step, a publication, a dropped group
    follower      one group of one worker            that worker, its death, or its deadline; then of another one
    train loop    enough groups in the buffer        a follower's put, or `buffer.fail` with what ended this loop

Shutdown: `close` cancels admission and followers; episodes end with the workers, their prompts were never accounted
for, so a resumed run samples them again. A follower that fails ends the loop and, through the buffer, the run.

A group that is lost to an infrastructure fault (its worker died, no engine answered) keeps its slot and its ticket and
is sampled again, `supervision.max_group_retries` times at most. Faults of data have another budget.
"""

import asyncio
from collections import Counter
from typing import Any

import ray

from rayrl.config.run import RunConfig
from rayrl.driver.admission import admission_capacity, remaining_demand
from rayrl.driver.failure_budget import FailureBudget
from rayrl.driver.failure_policy import FaultCause
from rayrl.driver.group_buffer import BufferedGroup, GroupBuffer
from rayrl.driver.group_filter import GroupFilter
from rayrl.driver.outcomes import OutcomeLog
from rayrl.driver.progress import Progress
from rayrl.driver.publisher import FaultHandler
from rayrl.driver.resample_log import ResampleLog
from rayrl.errors import ActorDied, ActorError, DataExhausted, DeadlineExceeded
from rayrl.infra.actor_group import ActorGroup, Member
from rayrl.infra.waiting import wait_for
from rayrl.rollout.episode import failed_trajectory
from rayrl.rollout.group import GroupRequest
from rayrl.rollout.settings import sampling_params
from rayrl.types.prompt import Prompt
from rayrl.types.trajectory import GroupSummary, summarize
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.rollout")
_GRACE_S = 60.0
"""What a worker may need beyond its own deadline to report a group."""


class RolloutLoop:
    """Keeps as many groups under way as admission allows."""

    def __init__(
        self,
        *,
        config: RunConfig,
        outcomes: OutcomeLog,
        workers: ActorGroup,
        buffer: GroupBuffer,
        progress: Progress,
    ) -> None:
        self._config = config
        self._outcomes = outcomes
        self._workers = workers
        self._buffer = buffer
        self._progress = progress
        self._params = sampling_params(config.rollout.sampling)
        self._budget = FailureBudget(
            what="groups without a usable trajectory",
            limit=config.driver.max_failed_groups,
            setting="driver.max_failed_groups",
            share=config.driver.max_failure_share,
        )
        self._filter = GroupFilter(config.algorithm.shaping)
        self._filter_budget = FailureBudget(
            what="groups filtered",
            limit=config.algorithm.shaping.max_filtered_groups,
            setting="algorithm.shaping.max_filtered_groups",
        )
        self._lost_budget = FailureBudget(
            what="groups lost to infrastructure faults",
            limit=config.supervision.max_lost_groups,
            setting="supervision.max_lost_groups",
        )
        self._dead: set[str] = set()
        self._load: Counter[str] = Counter()
        self._num_resampled = 0
        self._resample_log = ResampleLog(_LOGGER.warning)
        self.on_fault: FaultHandler | None = None
        """Told of a worker that did not answer in time; nobody is, when empty."""
        self._followers: set[asyncio.Task[None]] = set()
        self._in_flight: dict[int, Prompt] = {}
        self._exhausted: DataExhausted | None = None
        self._is_held = False

    @property
    def num_in_flight(self) -> int:
        """Groups that are being generated."""
        return len(self._in_flight)

    @property
    def num_failed(self) -> int:
        """Groups given up since the start."""
        return self._budget.total + self._lost_budget.total

    @property
    def num_resampled(self) -> int:
        """Times that a group was sampled again after an infrastructure fault."""
        return self._num_resampled

    @property
    def num_filtered(self) -> int:
        """Groups left out of training since the start."""
        return self._filter_budget.total

    async def run(self) -> None:
        """Admit groups until cancelled. What ends it early is raised here and to whoever waits on the buffer."""
        try:
            while True:
                self._progress.changed.clear()
                self._admit_all()
                await self._progress.changed.wait()
        except BaseException as error:
            self._buffer.fail(error)
            raise

    def _admit_all(self) -> None:
        self._exhausted = None
        try:
            for _ in range(self._capacity()):
                self._admit()
        except DataExhausted as error:
            self._exhausted = error
            self._end_if_exhausted()

    def _end_if_exhausted(self) -> None:
        """Without data the run goes on with what is under way; after that nothing comes any more."""
        if self._exhausted is not None and not self._in_flight and not self._is_held:
            self._buffer.fail(self._exhausted)

    async def hold(self) -> int:
        """Admit nothing until `go_on`, cancel all groups in flight and return how many there were.

        Their slots and prompts are the business of the caller.
        """
        self._is_held = True
        num_cancelled = len(self._followers)
        await self.close()
        return num_cancelled

    def go_on(self) -> None:
        """Admit groups again."""
        self._is_held = False
        self._progress.changed.set()

    def _capacity(self) -> int:
        if self._is_held:
            return 0
        driver = self._config.driver
        counts = self._progress.snapshot()
        capacity = admission_capacity(
            max_staleness=driver.max_staleness,
            groups_per_step=driver.groups_per_step,
            version=counts.version,
            consumed=counts.consumed,
            outstanding=counts.outstanding,
        )
        demand = remaining_demand(
            groups_per_step=driver.groups_per_step,
            num_steps=driver.num_steps,
            consumed=counts.consumed,
            outstanding=counts.outstanding,
        )
        return min(capacity, demand)

    def _admit(self) -> None:
        prompt = self._outcomes.next_prompt()
        self._progress.admit()
        ticket = self._buffer.new_ticket()
        self._in_flight[ticket] = prompt
        follower = asyncio.get_running_loop().create_task(self._follow(ticket, prompt))
        self._followers.add(follower)
        follower.add_done_callback(self._finish_follower)

    def _finish_follower(self, follower: asyncio.Task[None]) -> None:
        self._followers.discard(follower)
        if not follower.cancelled() and (error := follower.exception()) is not None:
            self._buffer.fail(error)
        self._end_if_exhausted()

    async def _follow(self, ticket: int, prompt: Prompt) -> None:
        try:
            summary, batch_ref, node = await self._sample(prompt)
        finally:
            del self._in_flight[ticket]
        self._arrive(ticket, summary, batch_ref, node)

    async def _sample(self, prompt: Prompt) -> tuple[GroupSummary, Any, str]:
        """Return summary, reference of the batch and node of a group, after as many tries as infrastructure needs."""
        rollout = self._config.rollout
        request = GroupRequest(
            prompt=prompt, group_size=rollout.group_size, params=self._params, seed=self._config.run.seed
        )
        retries = 0
        while True:
            try:
                summary, batch_ref, node = await self._run_group(request)
                if not is_infrastructure(summary):
                    return summary, batch_ref, node
                reason = summary.failures[0].message
            except (ActorError, DeadlineExceeded) as error:
                reason = str(error)
                summary, batch_ref, node = self._lost(prompt, retries + 1, reason), None, ""
            if retries == self._config.supervision.max_group_retries:
                return summary, batch_ref, node
            retries += 1
            self._num_resampled += 1
            self._resample_log.add(str(prompt.id), retries, reason.removeprefix(f"{_phase(prompt)}: "))

    async def _run_group(self, request: GroupRequest) -> tuple[GroupSummary, Any, str]:
        """Run a group on the worker that has least to do. ActorError or DeadlineExceeded if it is lost with it."""
        rollout = self._config.rollout
        seconds = rollout.episode_timeout_s * rollout.max_attempts + _GRACE_S
        phase = _phase(request.prompt)
        member = await self._pick(seconds, phase)
        self._load[member.name] += 1
        try:
            summary_ref, batch_ref = member.handle.run_group.options(num_returns=2).remote(request)
            try:
                summary: GroupSummary = await wait_for(summary_ref, seconds=seconds, phase=phase, actor=member.label)
            except asyncio.CancelledError:
                # Its episodes would go on, and take the engines from others, for nobody.
                ray.cancel(summary_ref)
                raise
        except ActorDied:
            # Whoever supervises the workers notices by itself; until then nothing more goes there.
            self._dead.add(member.name)
            raise
        except DeadlineExceeded as error:
            # Its episodes have deadlines of their own: a worker that does not keep them hangs.
            if self.on_fault is not None:
                self.on_fault(member.name, FaultCause.STALLED, str(error))
            raise
        finally:
            self._load[member.name] -= 1
        return summary, batch_ref, member.node

    async def _pick(self, seconds: float, phase: str) -> Member:
        deadline = asyncio.get_running_loop().time() + seconds
        await self._workers.wait_member(deadline, phase=phase, avoid=self._dead)
        alive = [member for member in self._workers.members if member.name not in self._dead]
        return min(alive, key=lambda member: self._load[member.name])

    def _lost(self, prompt: Prompt, attempts: int, message: str) -> GroupSummary:
        """Return the summary of a group of which nothing came back."""
        size = self._config.rollout.group_size
        return summarize(
            prompt.id,
            [failed_trajectory(prompt.id, index, "infrastructure", message, attempts) for index in range(size)],
            0.0,
        )

    def _arrive(self, ticket: int, summary: GroupSummary, batch_ref: Any, node: str) -> None:
        if summary.num_usable == 0:
            first = summary.failures[0]
            cause = f"{first.kind}: {first.message}"
            self._outcomes.give_up(summary, reason=cause, step=self._progress.step, version=self._progress.version)
            self._progress.release(1, consumed=False)
            _LOGGER.warning("group %s given up: %s", summary.prompt_id, cause)
            budget = self._lost_budget if is_infrastructure(summary) else self._budget
            budget.fail(f"{summary.prompt_id}: {cause}")
            return
        self._lost_budget.succeed()
        self._budget.succeed()
        reason = self._filter.reason(summary)
        if reason is not None:
            self._outcomes.leave_out(summary, reason=reason, step=self._progress.step, version=self._progress.version)
            self._progress.release(1, consumed=False)
            self._filter_budget.fail(f"{summary.prompt_id}: {reason}")
            return
        self._filter_budget.succeed()
        self._buffer.put(BufferedGroup(ticket=ticket, summary=summary, batch=batch_ref, node=node))

    def lose_node(self, node: str) -> None:
        """Send the prompts of buffered groups back whose batches lay on a node that is gone."""
        lost = [group for group in self._buffer.in_order() if group.node == node]
        if not lost:
            return
        self._buffer.remove([group.ticket for group in lost])
        for group in lost:
            self._outcomes.send_back(group.summary)
        self._num_resampled += len(lost)
        self._progress.release(len(lost), consumed=False)
        _LOGGER.warning("%d finished groups were lost with node %s and are sampled again", len(lost), node)

    async def close(self) -> None:
        """Cancel all followers and wait until they are gone."""
        for follower in list(self._followers):
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        self._resample_log.flush()

    def status(self) -> dict[str, Any]:
        """Return counts for status and the watchdog."""
        return {
            "in_flight": self.num_in_flight,
            "failed": self.num_failed,
            "oldest_in_flight": str(next(iter(self._in_flight.values())).id) if self._in_flight else None,
        }


def _phase(prompt: Prompt) -> str:
    return f"generation of group {prompt.id}"


def is_infrastructure(summary: GroupSummary) -> bool:
    """Return True if nothing of a group is usable and no prompt, workflow or reward is at fault."""
    return summary.num_usable == 0 and all(failure.kind == "infrastructure" for failure in summary.failures)
