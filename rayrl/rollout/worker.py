"""The rollout worker: a CPU actor with one event loop that runs many episodes at once."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from rayrl.errors import ActorDied, CheckpointError, EngineError
from rayrl.rollout.engine_sampler import EngineSampler
from rayrl.rollout.episode_board import EpisodeBoard
from rayrl.rollout.group import GroupRequest, run_group
from rayrl.rollout.pair_examples import PairEncoding, encode_pair
from rayrl.rollout.registry import make_workflow
from rayrl.rollout.settings import RolloutSettings
from rayrl.rollout.sft_examples import encode_example
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import EpisodeContext, Reward
from rayrl.types.sampling import Chunk, GenerationRequest, RequestFailure
from rayrl.types.trajectory import GroupSummary, summarize
from rayrl.utils.logger import get_logger, setup_logging

_EPISODES_TOLD = 8
"""Of those in flight, the ones that are longest in their stage."""
_ENGINE_WAIT_SHARE = 0.8
"""Of `rollout.episode_timeout_s`."""


class ActorEngineClient:
    """An inference engine behind a Ray actor handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def stream(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Chunk | RequestFailure]]:
        """Yield the lists of chunks that the engine sends. ActorDied if its process is gone."""
        from ray.exceptions import RayActorError

        from rayrl.infra.failures import is_death

        try:
            async for reference in self._handle.generate.options(num_returns="streaming").remote(requests):
                # The caller bounds each step of this iteration by its idle timeout.
                yield await reference
        except RayActorError as error:
            if not is_death(error):
                raise
            raise ActorDied(f"an inference engine died: {str(error).splitlines()[0]}") from error

    def abort(self, request_ids: list[str]) -> None:
        """Send the abort; nobody waits for it."""
        self._handle.abort.remote(request_ids)


class RolloutWorker:
    """Thin shell over `run_group`; it also does the few jobs on token arrays that the driver must not do itself."""

    def __init__(self, index: int, settings: RolloutSettings) -> None:
        from rayrl.models.context import context_limit
        from rayrl.models.tokenizer import load_tokenizer

        setup_logging()
        self._index = index
        self._logger = get_logger("rollout", index)
        self._settings = settings
        model = settings.model
        self._tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self._max_context = context_limit(model)
        self._rewards: dict[str, Reward] = {}
        self._num_groups = 0
        self._board = EpisodeBoard()
        if settings.rollout is not None and settings.reward is not None:
            from rayrl.rewards.registry import make_reward

            self._workflow = make_workflow(settings.rollout.workflow)
            self._rewards["train"] = make_reward(settings.reward)
            self._rewards["eval"] = (
                make_reward(settings.eval_reward) if settings.eval_reward is not None else self._rewards["train"]
            )
            if settings.scorers:
                from rayrl.rollout.text_scorer import connect_scorers

                connect_scorers(self._rewards.values(), settings.scorers)
            self._sampler = EngineSampler(
                name=f"r{index}",
                idle_timeout_s=settings.rollout.episode_timeout_s,
                max_attempts=settings.rollout.max_attempts,
                # Ends before the episode's own deadline, which would call it a fault of the episode.
                engine_wait_s=_ENGINE_WAIT_SHARE * settings.rollout.episode_timeout_s,
            )
        self._closed = asyncio.Event()

    async def ready(self) -> dict[str, Any]:
        """Return where this worker runs."""
        from rayrl.infra.process_info import process_info

        return process_info()

    async def until_closed(self) -> None:
        """Return after `close`; the call ends with the process, too, which is how the driver notices that."""
        await self._closed.wait()

    async def connect(self, engines: Mapping[str, Any]) -> None:
        """Sample from exactly these engines (name to actor handle) from now on."""
        self._sampler.connect({name: ActorEngineClient(handle) for name, handle in engines.items()})

    async def run_group(self, request: GroupRequest) -> tuple[GroupSummary, Any]:
        """Return summary and record batch of one group; called with two returns, so that only the first moves."""
        from rayrl.types.arrow import trajectories_to_batch

        summary, trajectories = await self._run(request)
        return summary, trajectories_to_batch(trajectories)

    async def run_evaluation(self, requests: list[GroupRequest]) -> list[GroupSummary]:
        """Return the summaries of held-out groups, in order."""
        results = await asyncio.gather(*(self._run(request) for request in requests))
        return [summary for summary, _ in results]

    async def _run(self, request: GroupRequest) -> tuple[GroupSummary, list[Any]]:
        rollout = self._settings.rollout
        if rollout is None:
            raise EngineError("this rollout worker was started without a rollout config; it only encodes examples")
        context = EpisodeContext(
            sampler=self._sampler,
            reward=self._rewards[request.purpose],
            tokenizer=self._tokenizer,
            params=request.params,
            max_context=self._max_context,
        )
        self._num_groups += 1
        return await run_group(
            request,
            self._workflow,
            context,
            timeout_s=rollout.episode_timeout_s,
            max_attempts=rollout.max_attempts,
            board=self._board,
        )

    async def encode_examples(self, prompts: list[Prompt], prompt_format: str, system_prompt: str | None) -> Any:
        """Return a record batch of supervised examples, one per prompt."""
        from rayrl.types.arrow import trajectories_to_batch

        return trajectories_to_batch(
            [
                encode_example(
                    prompt,
                    self._tokenizer,
                    prompt_format=prompt_format,
                    system_prompt=system_prompt,
                    max_context=self._max_context,
                )
                for prompt in prompts
            ]
        )

    async def encode_pairs(self, prompts: list[Prompt], encoding: PairEncoding) -> Any:
        """Return a record batch of pairs, two rows per prompt, the better answer first."""
        from rayrl.types.arrow import trajectories_to_batch

        pairs = [encode_pair(prompt, self._tokenizer, encoding, self._max_context) for prompt in prompts]
        return trajectories_to_batch([example for pair in pairs for example in pair])

    async def write_rollouts(self, path: str, *batches: Any) -> None:
        """Append consumed groups to the rollout log on disk."""
        from rayrl.tracking.rollout_log import write_rollouts

        await asyncio.to_thread(write_rollouts, Path(path), list(batches))

    async def write_groups(self, path: str, *batches: Any) -> None:
        """Write buffered groups into a checkpoint. CheckpointError if that cannot be done."""
        from rayrl.checkpoint.run_state import write_groups

        try:
            await asyncio.to_thread(write_groups, Path(path), list(batches))
        except OSError as error:
            raise CheckpointError(f"cannot write buffered groups to {path}: {error.strerror or error}") from error

    async def read_groups(self, path: str) -> list[Any]:
        """Return the summaries of a checkpoint's buffered groups, then their batches, each in order."""
        from rayrl.checkpoint.run_state import read_groups
        from rayrl.types.arrow import batch_to_trajectories

        batches = await asyncio.to_thread(read_groups, Path(path))
        groups = [batch_to_trajectories(batch) for batch in batches]
        return [*(summarize(group[0].prompt_id, group, 0.0) for group in groups), *batches]

    async def status(self) -> dict[str, Any]:
        """Return counts of this worker."""
        return {
            "groups": self._num_groups,
            "load": self._sampler.load if self._rewards else {},
            "episodes": len(self._board),
            "oldest_episodes": self._board.oldest(_EPISODES_TOLD),
        }

    async def close(self) -> None:
        """Stop reading from engines and end the processes of rewards."""
        self._closed.set()
        if self._rewards:
            await self._sampler.close()
        from rayrl.rewards.registry import close_reward

        for reward in set(self._rewards.values()):
            await close_reward(reward)
