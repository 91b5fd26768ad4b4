"""One group: the G episodes of a prompt, run together."""

import asyncio
import dataclasses
import hashlib
import time
from dataclasses import dataclass

from rayrl.rollout.episode import run_episode
from rayrl.rollout.episode_board import EpisodeBoard
from rayrl.types.prompt import Prompt, PromptId
from rayrl.types.protocols import EpisodeContext, Workflow
from rayrl.types.sampling import SamplingParams
from rayrl.types.trajectory import GroupSummary, Trajectory, summarize


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """What the driver asks a rollout worker for."""

    prompt: Prompt
    group_size: int
    params: SamplingParams
    purpose: str = "train"
    """`train` or `eval`: which reward scores it."""
    seed: int | None = None
    """Each sample gets a seed of its own from this and its place; None samples without seeds."""


def sample_seed(seed: int, prompt_id: PromptId, sample_index: int) -> int:
    """Return the seed of one sample: a fixed function of run seed, prompt and place, below 2**63."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def run_group(
    request: GroupRequest,
    workflow: Workflow,
    context: EpisodeContext,
    *,
    timeout_s: float,
    max_attempts: int,
    board: EpisodeBoard | None = None,
) -> tuple[GroupSummary, list[Trajectory]]:
    """Run all episodes of a group at once and return its summary and trajectories, failed ones included.

    `board` shows what each of them does meanwhile.
    """
    shown = board if board is not None else EpisodeBoard()
    start = time.monotonic()

    def episode_context(index: int) -> EpisodeContext:
        seed = None if request.seed is None else sample_seed(request.seed, request.prompt.id, index)
        return dataclasses.replace(context, params=dataclasses.replace(request.params, seed=seed))

    async def episode(index: int) -> Trajectory:
        with shown.episode(request.prompt.id, index, episode_context(index)) as seen:
            return await run_episode(
                workflow, request.prompt, index, seen, timeout_s=timeout_s, max_attempts=max_attempts
            )

    trajectories = await asyncio.gather(*(episode(index) for index in range(request.group_size)))
    return summarize(request.prompt.id, trajectories, time.monotonic() - start), trajectories
