"""All actors of a run: placed, started together, torn down together."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rayrl.config.driver import DeadlineConfig
from rayrl.config.model import ModelConfig
from rayrl.config.run import RunConfig
from rayrl.config.supervised import SupervisedRunConfig
from rayrl.driver.frozen_models import absolute_critic, absolute_reward, frozen_starters, scorer_entries
from rayrl.driver.member_starter import MemberStarter
from rayrl.inference.engine_actor import EngineActor
from rayrl.inference.settings import EngineSettings
from rayrl.infra.actor_group import ActorGroup
from rayrl.infra.collective_recorder import Recording
from rayrl.infra.collective_report import FOLDER
from rayrl.infra.placement_plan import plan_placement, plan_sft_placement, resolved_transfer
from rayrl.infra.reservation import Reservation, reserve
from rayrl.rollout.settings import RolloutSettings
from rayrl.rollout.worker import RolloutWorker
from rayrl.training.settings import TrainWorkerSettings
from rayrl.training.worker import TrainWorker
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.fleet")
_EPISODES_AT_ONCE = 100_000
"""Calls that an async actor takes at once; admission bounds them long before."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """The actor groups of a run; `inference` is None for supervised runs, `frozen` has reward models and teacher."""

    reservation: Reservation
    train: ActorGroup
    rollout: ActorGroup
    inference: ActorGroup | None
    shutdown_s: float
    starters: dict[str, MemberStarter] = field(default_factory=dict)
    """How to start further members, by role, for the supervisor."""
    frozen: Mapping[str, ActorGroup] = field(default_factory=dict)
    """By role."""

    def groups(self) -> list[ActorGroup]:
        """Return all groups that there are."""
        groups = (self.rollout, self.inference, self.train, *self.frozen.values())
        return [group for group in groups if group is not None]

    async def close(self) -> None:
        """Let every actor leave in order, then kill what is left and give the resources back."""
        groups = self.groups()
        # Rollout first: its episodes hold requests on the engines, which would otherwise fail loudly while leaving.
        for group in groups:
            await group.shutdown(self.shutdown_s)
        await asyncio.to_thread(self.reservation.release)


def absolute_model(model: ModelConfig) -> ModelConfig:
    """Return the model with an absolute path: actors do not run in the working directory of the driver."""
    return model.model_copy(update={"path": str(Path(model.path).absolute())})


def thread_env(num_threads: int) -> dict[str, str]:
    """Return the variables that must be set before a worker imports its numeric libraries."""
    # The last one is what cuBLAS needs to be deterministic; it reads it only then.
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def collective_recording(config: RunConfig) -> Recording | None:
    """Return how the processes of a run record their collectives, below the logs of its folder."""
    debug = config.debug
    if debug.collectives == "off":
        return None
    folder = config.run_dir.absolute() / "logs" / FOLDER
    return Recording(folder=str(folder), checks=debug.collectives == "check", timeout_s=debug.collective_timeout_s)


async def start_fleet(config: RunConfig) -> Fleet:
    """Place and start all actors of a reinforcement learning run. PlacementError, ActorError or DeadlineExceeded."""
    deadlines = config.driver.deadlines
    reservation = await asyncio.to_thread(reserve, plan_placement(config), deadlines.placement_s)
    # Before the others: rollout workers, also those that replace lost ones, are told of reward models when they start.
    frozen = await _start_together(frozen_starters(config, reservation, deadlines), reservation, deadlines.shutdown_s)
    try:
        return await _start_around(config, frozen, reservation, deadlines)
    except BaseException:
        await asyncio.gather(*(group.shutdown(deadlines.shutdown_s) for group in frozen.values()))
        raise


async def _start_around(
    config: RunConfig, frozen: Mapping[str, ActorGroup], reservation: Reservation, deadlines: DeadlineConfig
) -> Fleet:
    """Start the groups of a reinforcement learning run that may ask frozen models."""
    model = absolute_model(config.model)
    engine_settings = EngineSettings(
        model=model,
        inference=config.inference,
        transfer=resolved_transfer(config),
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        lora=config.training.lora if config.transfer.lora == "adapters" else None,
        recording=collective_recording(config),
    )
    eval_reward = None if config.evaluation is None else config.evaluation.reward
    rollout_settings = RolloutSettings(
        model=model,
        rollout=config.rollout,
        reward=absolute_reward(config.reward),
        eval_reward=None if eval_reward is None else absolute_reward(eval_reward),
        scorers=scorer_entries(config, frozen),
    )
    starters = {
        "train": _start_train(_rl_settings(config, model), reservation, deadlines),
        "inference": _start_inference(engine_settings, reservation, deadlines),
        "rollout": _start_rollout(rollout_settings, config.rollout.num_workers, reservation, deadlines),
    }
    groups = await _start_together(starters, reservation, deadlines.shutdown_s)
    fleet = Fleet(
        reservation=reservation,
        train=groups["train"],
        inference=groups["inference"],
        rollout=groups["rollout"],
        shutdown_s=deadlines.shutdown_s,
        starters={
            role: MemberStarter(
                role=role,
                group=groups[role],
                reservation=reservation,
                args_of=partial(_member_args, settings),
                start_timeout_s=deadlines.start_s,
            )
            for role, settings in (("inference", engine_settings), ("rollout", rollout_settings))
        },
        frozen=frozen,
    )
    engines = {member.name: member.handle for member in groups["inference"].members}
    await fleet.rollout.call_all("connect", engines, seconds=deadlines.start_s, phase="connecting rollout to engines")
    return fleet


async def start_training_group(config: RunConfig, reservation: Reservation) -> ActorGroup:
    """Start the training workers of a reinforcement learning run again, in the places of those that are gone."""
    settings = _rl_settings(config, absolute_model(config.model))
    return await _start_train(settings, reservation, config.driver.deadlines)


async def start_supervised_fleet(
    config: SupervisedRunConfig, adapt: Callable[[TrainWorkerSettings], TrainWorkerSettings]
) -> Fleet:
    """Place and start the actors of a run on given answers: training workers and one worker that encodes examples.

    `adapt` gives the training workers what the kind of run needs.
    """
    deadlines = config.loop.deadlines
    reservation = await asyncio.to_thread(reserve, plan_sft_placement(config), deadlines.placement_s)
    model = absolute_model(config.model)
    starters = {
        "train": _start_train(adapt(_supervised_settings(config, model)), reservation, deadlines),
        "rollout": _start_rollout(RolloutSettings(model=model), 1, reservation, deadlines),
    }
    groups = await _start_together(starters, reservation, deadlines.shutdown_s)
    return Fleet(
        reservation=reservation,
        train=groups["train"],
        inference=None,
        rollout=groups["rollout"],
        shutdown_s=deadlines.shutdown_s,
    )


async def _start_together(
    starters: dict[str, Any], reservation: Reservation, shutdown_s: float
) -> dict[str, ActorGroup]:
    """Start all groups at once; if one fails, or the caller is cancelled, tear the others down and raise its error."""
    if not starters:
        return {}
    tasks = [asyncio.ensure_future(starter) for starter in starters.values()]
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError as error:
        cancelled = error
        for task in tasks:
            task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    groups = {name: result for name, result in zip(starters, results, strict=True) if isinstance(result, ActorGroup)}
    errors = [cancelled] if cancelled is not None else [item for item in results if isinstance(item, BaseException)]
    if errors:
        await asyncio.gather(*(group.shutdown(shutdown_s) for group in groups.values()))
        await asyncio.to_thread(reservation.release)
        raise errors[0]
    return groups


def _rl_settings(config: RunConfig, model: ModelConfig) -> TrainWorkerSettings:
    return TrainWorkerSettings(
        model=model,
        training=config.training,
        algorithm=absolute_critic(config.algorithm),
        temperature=config.rollout.sampling.temperature,
        minibatches=config.driver.minibatches,
        num_steps=config.driver.num_steps * config.driver.minibatches,
        max_new_tokens=config.rollout.sampling.max_new_tokens,
        seed=config.run.seed,
        collective_timeout_s=config.driver.deadlines.step_s,
        transfer=resolved_transfer(config),
        deterministic=config.run.deterministic,
        recording=collective_recording(config),
    )


def _supervised_settings(config: SupervisedRunConfig, model: ModelConfig) -> TrainWorkerSettings:
    return TrainWorkerSettings(
        model=model,
        training=config.training,
        algorithm=None,
        temperature=1.0,
        minibatches=1,
        num_steps=config.loop.num_steps,
        max_new_tokens=0,
        seed=config.run.seed,
        collective_timeout_s=config.loop.deadlines.step_s,
        transfer=None,
    )


async def _start_train(
    settings: TrainWorkerSettings, reservation: Reservation, deadlines: DeadlineConfig
) -> ActorGroup:
    training = settings.training
    world_size = training.parallel.world_size
    group = await ActorGroup.spawn(
        "train",
        TrainWorker,
        args_per_member=[(rank, world_size, settings) for rank in range(world_size)],
        options_per_member=[reservation.options("train", rank) for rank in range(world_size)],
        env=thread_env(training.threads_per_worker),
        max_concurrency=None,
        start_timeout_s=deadlines.start_s,
    )
    try:
        phase = "start of the training group"
        address = await group.call(0, "host_training_rendezvous", seconds=deadlines.start_s, phase=phase)
        await group.call_all("setup", address, seconds=deadlines.start_s, phase=phase)
    except BaseException:
        await group.shutdown(deadlines.shutdown_s)
        raise
    _LOGGER.info("%d training workers are ready", world_size)
    return group


def _member_args(settings: EngineSettings | RolloutSettings, index: int) -> tuple[Any, ...]:
    return (index, settings)


async def _start_inference(settings: EngineSettings, reservation: Reservation, deadlines: DeadlineConfig) -> ActorGroup:
    inference = settings.inference
    group = await ActorGroup.spawn(
        "inference",
        EngineActor,
        args_per_member=[(index, settings) for index in range(inference.num_engines)],
        options_per_member=[reservation.options("inference", index) for index in range(inference.num_engines)],
        env=thread_env(inference.threads_per_engine),
        max_concurrency=_EPISODES_AT_ONCE,
        start_timeout_s=deadlines.start_s,
    )
    _LOGGER.info("%d inference engines are ready (%s)", inference.num_engines, inference.engine.type)
    return group


async def _start_rollout(
    settings: RolloutSettings, num_workers: int, reservation: Reservation, deadlines: DeadlineConfig
) -> ActorGroup:
    return await ActorGroup.spawn(
        "rollout",
        RolloutWorker,
        args_per_member=[(index, settings) for index in range(num_workers)],
        options_per_member=[reservation.options("rollout", index) for index in range(num_workers)],
        env=thread_env(1),
        max_concurrency=_EPISODES_AT_ONCE,
        start_timeout_s=deadlines.start_s,
    )
