"""One episode with its deadline and attempts; here a failure becomes a record on the trajectory."""

import asyncio
import math
import traceback
from typing import Literal

from rayrl.errors import ActorError, DeadlineExceeded, EngineError, RewardError, WorkflowError
from rayrl.rollout.single_turn import PromptTooLong
from rayrl.types.prompt import Prompt, PromptId
from rayrl.types.protocols import EpisodeContext, Workflow
from rayrl.types.trajectory import FailureRecord, Trajectory, check_trajectory
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("rollout.episode")

FailureKind = Literal["workflow", "reward", "infrastructure", "timeout", "prompt"]


def classify_failure(error: BaseException) -> FailureKind:
    """Return whose fault an exception is. Only `infrastructure` is worth another attempt."""
    if isinstance(error, PromptTooLong):
        return "prompt"
    if isinstance(error, RewardError):
        return "reward"
    if isinstance(error, EngineError | ActorError | DeadlineExceeded):
        return "infrastructure"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "workflow"


async def run_episode(
    workflow: Workflow,
    prompt: Prompt,
    sample_index: int,
    context: EpisodeContext,
    *,
    timeout_s: float,
    max_attempts: int,
) -> Trajectory:
    """Return the trajectory of one episode, with a failure record where it failed. Never raises for a failure.

    Infrastructure faults are tried `max_attempts` times; faults of the data, the workflow or the reward once.
    """
    for attempt in range(1, max_attempts + 1):
        try:
            async with asyncio.timeout(timeout_s):
                trajectory = await workflow.run_episode(prompt, sample_index, context)
            _check_usable(trajectory, prompt.id, sample_index)
            return trajectory
        # SystemExit, from `exit()` in user code, would end the worker with all its other episodes.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary where a failing episode becomes data
            kind = classify_failure(error)
            message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if kind == "timeout":
                message = f"episode took longer than rollout.episode_timeout_s={timeout_s}"
            _LOGGER.debug("episode %s#%d failed:\n%s", prompt.id, sample_index, traceback.format_exc())
            if kind != "infrastructure" or attempt == max_attempts:
                return failed_trajectory(prompt.id, sample_index, kind, message, attempt)
    raise AssertionError("unreachable: the last attempt returns")


def _check_usable(trajectory: Trajectory, prompt_id: PromptId, sample_index: int) -> None:
    """Raise WorkflowError for what training could not use: it would fail there, far from the workflow at fault."""
    if not isinstance(trajectory, Trajectory):
        raise WorkflowError(f"the workflow returned {type(trajectory).__name__}, not a Trajectory")
    check_trajectory(trajectory)
    if (trajectory.prompt_id, trajectory.sample_index) != (prompt_id, sample_index):
        raise WorkflowError(
            f"the workflow returned sample {trajectory.sample_index} of {trajectory.prompt_id} when it was asked for "
            f"sample {sample_index} of {prompt_id}"
        )
    if trajectory.failure is not None:
        return
    if not trajectory.spans:
        raise WorkflowError("the trajectory has no sampled token, so there is nothing to train on")
    if trajectory.loss_mask[0]:
        raise WorkflowError(
            "the first token of the trajectory carries loss, but nothing stands before it to predict it"
        )
    if not math.isfinite(trajectory.reward or 0.0):
        raise WorkflowError(f"the reward of the trajectory is {trajectory.reward}, which is not finite")
    if not all(map(math.isfinite, trajectory.logprobs)):
        raise WorkflowError("a logprob of the trajectory is not finite")


def failed_trajectory(
    prompt_id: PromptId, sample_index: int, kind: FailureKind, message: str, attempts: int
) -> Trajectory:
    """Return the record of an episode that has no tokens to train on."""
    return Trajectory(
        prompt_id=prompt_id,
        sample_index=sample_index,
        tokens=(),
        loss_mask=(),
        logprobs=(),
        spans=(),
        reward=None,
        stop_reason="error",
        failure=FailureRecord(kind=kind, message=message[:2000], attempts=attempts),
    )
