"""The frozen models of a run: reward models and a teacher, one actor each, and what the driver asks a teacher."""

from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.driver import DeadlineConfig
from rayrl.config.frozen import FrozenModelSection
from rayrl.config.reward import RewardConfig, RewardModelReward, WeightedSumReward, reward_models
from rayrl.config.run import RunConfig
from rayrl.infra.actor_group import ActorGroup
from rayrl.infra.placement_plan import SCORER_ROLE, TEACHER_ROLE
from rayrl.infra.reservation import Reservation
from rayrl.infra.waiting import wait_for
from rayrl.rollout.text_scorer import ScorerEntry
from rayrl.training.frozen_actor import FrozenModelActor, FrozenModelSettings

SectionT = TypeVar("SectionT", bound=FrozenModelSection)
_CALLS_AT_ONCE = 100_000
"""Calls that an actor takes at once; they wait inside for the next batch."""


class Teacher:
    """The teacher's actor as the train loop sees it."""

    def __init__(self, group: ActorGroup, seconds: float) -> None:
        self._group = group
        self._seconds = seconds

    async def annotate(self, batches: Sequence[Any]) -> list[Any]:
        """Return references to the batches with the teacher's logprobs, once they are there.

        Raises ActorError if the actor died more often than it may, DeadlineExceeded after `deadlines.step_s`.
        """
        member = self._group.members[0]
        count, *annotated = member.handle.annotate.options(num_returns=len(batches) + 1).remote(*batches)
        await wait_for(count, seconds=self._seconds, phase="logprobs of the teacher", actor=member.label)
        return annotated


def frozen_starters(
    config: RunConfig, reservation: Reservation, deadlines: DeadlineConfig
) -> dict[str, Coroutine[Any, Any, ActorGroup]]:
    """Return what starts the actor of each frozen model, by role."""
    starters = {
        f"{SCORER_ROLE}-{index}": _start(
            FrozenModelSettings(
                name=f"{SCORER_ROLE}-{index}", model=model, head="scalar", max_batch_size=model.max_batch_size
            ),
            reservation,
            deadlines,
        )
        for index, model in enumerate(scoring_models(config))
    }
    if config.teacher is not None:
        settings = FrozenModelSettings(
            name=TEACHER_ROLE,
            model=_absolute(config.teacher),
            head="policy",
            temperature=config.rollout.sampling.temperature,
        )
        starters[TEACHER_ROLE] = _start(settings, reservation, deadlines)
    return starters


def scorer_entries(config: RunConfig, frozen: Mapping[str, ActorGroup]) -> tuple[ScorerEntry, ...]:
    """Return what rollout workers are told of the reward models, given the groups of frozen models by role."""
    entries = []
    for index, model in enumerate(scoring_models(config)):
        member = frozen[f"{SCORER_ROLE}-{index}"].members[0]
        entries.append(ScorerEntry(settings=model, handle=member.handle, label=member.label))
    return tuple(entries)


def scoring_models(config: RunConfig) -> tuple[RewardModelReward, ...]:
    """Return the reward models of training and evaluation, with absolute paths, in the order of their roles."""
    evaluation = None if config.evaluation is None else config.evaluation.reward
    return tuple(_absolute(model) for model in reward_models(config.reward, evaluation))


def absolute_reward(reward: RewardConfig) -> RewardConfig:
    """Return the reward with absolute paths of reward models: actors do not run in the driver's working directory."""
    if isinstance(reward, RewardModelReward):
        return _absolute(reward)
    if isinstance(reward, WeightedSumReward):
        terms = tuple(term.model_copy(update={"reward": absolute_reward(term.reward)}) for term in reward.terms)
        return reward.model_copy(update={"terms": terms})
    return reward


def absolute_critic(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return the algorithm with an absolute path of the critic's model, if it names one."""
    critic = algorithm.critic
    if critic is None or critic.path is None:
        return algorithm
    moved = critic.model_copy(update={"path": str(Path(critic.path).absolute())})
    return algorithm.model_copy(update={"critic": moved})


def _absolute(model: SectionT) -> SectionT:
    return model.model_copy(update={"path": str(Path(model.path).absolute())})


async def _start(settings: FrozenModelSettings, reservation: Reservation, deadlines: DeadlineConfig) -> ActorGroup:
    # It keeps no state, so Ray itself may start it again and repeat its calls.
    restarts = {"max_restarts": settings.model.max_restarts, "max_task_retries": settings.model.max_restarts}
    return await ActorGroup.spawn(
        settings.name,
        FrozenModelActor,
        args_per_member=[(settings,)],
        options_per_member=[{**reservation.options(settings.name, 0), **restarts}],
        env={"OMP_NUM_THREADS": str(settings.model.threads), "TOKENIZERS_PARALLELISM": "false"},
        max_concurrency=_CALLS_AT_ONCE,
        start_timeout_s=deadlines.start_s,
    )
