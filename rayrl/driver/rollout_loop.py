"""The rollout loop: prompts get slots, rollout workers make groups of them, the buffer takes the groups.

    prompt stream --slot--> rollout worker (run_group) --summary + reference--> group buffer --> train loop

    task          waits for                          unblocked by
    admission     capacity                           progress.changed: a step, a publication, a dropped group
    follower      one group of one worker            that worker, or its deadline
    train loop    enough groups in the buffer        a follower's put, or `buffer.fail` with what ended this loop

Shutdown: `close` cancels admission and followers; episodes end with the workers, their prompts were never accounted
for, so a resumed run samples them again. A follower that fails ends the loop and, through the buffer, the run.
"""

import asyncio
from typing import Any

from rayrl.config.run import RunConfig
from rayrl.driver.admission import admission_capacity, remaining_demand
from rayrl.driver.failure_budget import FailureBudget
from rayrl.driver.group_buffer import BufferedGroup, GroupBuffer
from rayrl.driver.group_filter import GroupFilter
from rayrl.driver.outcomes import OutcomeLog
from rayrl.driver.progress import Progress
from rayrl.infra.actor_group import ActorGroup
from rayrl.infra.waiting import wait_for
from rayrl.rollout.group import GroupRequest
from rayrl.rollout.settings import sampling_params
from rayrl.types.prompt import Prompt
from rayrl.types.trajectory import GroupSummary
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
        self._load = [0] * len(workers.members)
        self._followers: set[asyncio.Task[None]] = set()
        self._in_flight: dict[int, Prompt] = {}

    @property
    def num_in_flight(self) -> int:
        """Groups that are being generated."""
        return len(self._in_flight)

    @property
    def num_failed(self) -> int:
        """Groups given up since the start."""
        return self._budget.total

    @property
    def num_filtered(self) -> int:
        """Groups left out of training since the start."""
        return self._filter_budget.total

    async def run(self) -> None:
        """Admit groups until cancelled. What ends it early is raised here and to whoever waits on the buffer."""
        try:
            while True:
                self._progress.changed.clear()
                for _ in range(self._capacity()):
                    self._admit()
                await self._progress.changed.wait()
        except BaseException as error:
            self._buffer.fail(error)
            raise

    def _capacity(self) -> int:
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
        worker = min(range(len(self._load)), key=lambda index: self._load[index])
        self._load[worker] += 1
        self._in_flight[ticket] = prompt
        follower = asyncio.get_running_loop().create_task(self._follow(ticket, prompt, worker))
        self._followers.add(follower)
        follower.add_done_callback(self._finish_follower)

    def _finish_follower(self, follower: asyncio.Task[None]) -> None:
        self._followers.discard(follower)
        if not follower.cancelled() and (error := follower.exception()) is not None:
            self._buffer.fail(error)

    async def _follow(self, ticket: int, prompt: Prompt, worker: int) -> None:
        rollout = self._config.rollout
        request = GroupRequest(
            prompt=prompt, group_size=rollout.group_size, params=self._params, seed=self._config.run.seed
        )
        member = self._workers.members[worker]
        try:
            summary_ref, batch_ref = member.handle.run_group.options(num_returns=2).remote(request)
            summary: GroupSummary = await wait_for(
                summary_ref,
                seconds=rollout.episode_timeout_s * rollout.max_attempts + _GRACE_S,
                phase=f"generation of group {prompt.id}",
                actor=member.label,
            )
        finally:
            self._load[worker] -= 1
            del self._in_flight[ticket]
        self._arrive(ticket, summary, batch_ref)

    def _arrive(self, ticket: int, summary: GroupSummary, batch_ref: Any) -> None:
        if summary.num_usable == 0:
            first = summary.failures[0]
            cause = f"{first.kind}: {first.message}"
            self._outcomes.give_up(summary, reason=cause, step=self._progress.step, version=self._progress.version)
            self._progress.release(1, consumed=False)
            _LOGGER.warning("group %s given up: %s", summary.prompt_id, cause)
            self._budget.fail(f"{summary.prompt_id}: {cause}")
            return
        self._budget.succeed()
        reason = self._filter.reason(summary)
        if reason is not None:
            self._outcomes.leave_out(summary, reason=reason, step=self._progress.step, version=self._progress.version)
            self._progress.release(1, consumed=False)
            self._filter_budget.fail(f"{summary.prompt_id}: {reason}")
            return
        self._filter_budget.succeed()
        self._buffer.put(BufferedGroup(ticket=ticket, summary=summary, batch=batch_ref))

    async def close(self) -> None:
        """Cancel all followers and wait until they are gone."""
        for follower in list(self._followers):
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """Return counts for status and the watchdog."""
        return {
            "in_flight": self.num_in_flight,
            "failed": self.num_failed,
            "oldest_in_flight": str(next(iter(self._in_flight.values())).id) if self._in_flight else None,
        }
