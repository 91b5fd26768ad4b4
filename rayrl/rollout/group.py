"""One group: the G episodes of a prompt, run together."""

import asyncio
import dataclasses
import hashlib
import time
from dataclasses import dataclass

from rayrl.rollout.episode import run_episode
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
    request: GroupRequest, workflow: Workflow, context: EpisodeContext, *, timeout_s: float, max_attempts: int
) -> tuple[GroupSummary, list[Trajectory]]:
    """Run all episodes of a group at once and return its summary and trajectories, failed ones included."""
    start = time.monotonic()

    def episode_context(index: int) -> EpisodeContext:
        seed = None if request.seed is None else sample_seed(request.seed, request.prompt.id, index)
        return dataclasses.replace(context, params=dataclasses.replace(request.params, seed=seed))

    trajectories = await asyncio.gather(
        *(
            run_episode(
                workflow,
                request.prompt,
                index,
                episode_context(index),
                timeout_s=timeout_s,
                max_attempts=max_attempts,
            )
            for index in range(request.group_size)
        )
    )
    return summarize(request.prompt.id, trajectories, time.monotonic() - start), trajectories
