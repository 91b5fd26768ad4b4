"""Evaluation on held-out prompts, on exactly one weight version.

An evaluation starts once a version is published and must end before the next publication: `finish` is awaited there.
Training and the sampling of training data go on meanwhile. The versions of all sampled tokens are checked.
"""

import asyncio
import time
from collections.abc import Callable

from rayrl.config.run import RunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.errors import ActorDied
from rayrl.infra.actor_group import ActorGroup
from rayrl.rollout.group import GroupRequest
from rayrl.rollout.settings import sampling_params
from rayrl.types.prompt import Prompt
from rayrl.types.trajectory import GroupSummary
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.evaluator")
_LOOK_S = 0.5
"""Between two looks at whether an evaluation can still end."""


class Evaluator:
    """Runs the held-out prompts over the rollout workers."""

    def __init__(self, *, config: RunConfig, workers: ActorGroup) -> None:
        self._config = config
        self._workers = workers
        self._task: asyncio.Task[dict[str, float]] | None = None
        self._prompts: list[Prompt] = []
        if config.evaluation is not None:
            source = load_source(config.evaluation.dataset)
            count = min(len(source), config.evaluation.num_prompts or len(source))
            stream = PromptStream(source, seed=0, shuffle=False)
            self._prompts = [stream.next_prompt() for _ in range(count)]

    @property
    def is_enabled(self) -> bool:
        """True if the config has an evaluation section."""
        return bool(self._prompts)

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation follows `step`; the last step's is started by the train loop."""
        evaluation = self._config.evaluation
        return evaluation is not None and evaluation.every > 0 and step % evaluation.every == 0

    def start(self, version: int) -> None:
        """Start an evaluation of the current version in the background."""
        if not self.is_enabled:
            return
        assert self._task is None, "the last evaluation was not finished before the next one"
        self._task = asyncio.get_running_loop().create_task(self._run(version))

    async def finish(self, abandon_if: Callable[[], bool] | None = None) -> dict[str, float] | None:
        """Wait for the running evaluation and return its metrics; None if there is none.

        It is abandoned, with a warning, once `abandon_if` says that nobody can finish it.
        """
        if self._task is None:
            return None
        task, self._task = self._task, None
        while abandon_if is not None and not task.done():
            if abandon_if():
                _LOGGER.warning("the running evaluation is abandoned: no engine is left that has its version")
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return None
            await asyncio.wait([task], timeout=_LOOK_S)
        return await task

    async def close(self) -> None:
        """Cancel a running evaluation."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self, version: int) -> dict[str, float]:
        evaluation = self._config.evaluation
        assert evaluation is not None
        start = time.monotonic()
        params = sampling_params(evaluation.sampling)
        requests = [
            GroupRequest(prompt=prompt, group_size=1, params=params, purpose="eval", seed=self._config.run.seed)
            for prompt in self._prompts
        ]
        num_workers = max(1, len(self._workers.members))
        shares = await asyncio.gather(
            *(self._run_share(index, requests[index::num_workers], version) for index in range(num_workers))
        )
        summaries = [summary for share in shares for summary in share]
        return summarize_evaluation(
            summaries,
            version=version,
            success_threshold=evaluation.success_threshold,
            seconds=time.monotonic() - start,
        )

    async def _run_share(self, index: int, requests: list[GroupRequest], version: int) -> list[GroupSummary]:
        """Run a share of the prompts on one worker, and once more on another one if that dies."""
        rollout = self._config.rollout
        seconds = rollout.episode_timeout_s * rollout.max_attempts + self._config.driver.deadlines.generation_s
        phase = f"evaluation of version {version}"
        try:
            return list(await self._workers.call(index, "run_evaluation", requests, seconds=seconds, phase=phase))
        except ActorDied:
            return list(await self._workers.call_any("run_evaluation", requests, seconds=seconds, phase=phase))


def summarize_evaluation(
    summaries: list[GroupSummary], *, version: int, success_threshold: float, seconds: float
) -> dict[str, float]:
    """Return metrics over held-out groups. A failed episode counts as not correct, and is shown.

    `eval/accuracy` is over all prompts; `eval/other_version_share` must be 0: it counts prompts with tokens
    that another version than `version` sampled.
    """
    rewards = [reward for summary in summaries for reward in summary.rewards]
    num_prompts = max(1, len(summaries))
    strays = sum(
        summary.oldest_version is not None and {summary.oldest_version, summary.newest_version} != {version}
        for summary in summaries
    )
    return {
        "eval/accuracy": sum(reward >= success_threshold for reward in rewards) / num_prompts,
        "eval/reward_mean": sum(rewards) / num_prompts,
        "eval/failed": float(sum(len(summary.failures) for summary in summaries)),
        "eval/truncated_share": sum(summary.num_truncated for summary in summaries) / num_prompts,
        "eval/version": float(version),
        "eval/other_version_share": strays / num_prompts,
        "eval/prompts": float(len(summaries)),
        "eval/seconds": seconds,
    }
