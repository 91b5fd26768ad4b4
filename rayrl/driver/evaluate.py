"""Evaluate a model on held-out prompts, through the same engines, workflow and reward as in training."""

import asyncio

from rayrl.config.run import RunConfig
from rayrl.driver.evaluator import Evaluator
from rayrl.driver.fleet import start_fleet
from rayrl.driver.preflight import check_run
from rayrl.driver.publisher import Publisher
from rayrl.driver.result import RunResult
from rayrl.driver.stop_signal import StopSignal
from rayrl.errors import ConfigError
from rayrl.infra.cluster import join_cluster, leave_cluster
from rayrl.infra.placement_plan import plan_placement


def evaluate(config: RunConfig, model_path: str | None = None) -> RunResult:
    """Return the metrics of the config's evaluation section; nothing is written.

    Args:
        config: needs an `evaluation` section.
        model_path: another model folder than the config's, a run's `export` for example.
    """
    if config.evaluation is None:
        raise ConfigError("the config has no evaluation section; add evaluation.dataset and evaluation.sampling")
    if model_path is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": model_path})})
    check_run(config)
    return asyncio.run(_evaluate(config))


async def _evaluate(config: RunConfig) -> RunResult:
    cluster = await asyncio.to_thread(join_cluster, plan_placement(config).total.get("CPU", 0.0))
    stop = StopSignal()
    try:
        # Never `begin`: there is nothing to save, each signal leaves at once.
        stop.install()
        fleet = await start_fleet(config)
        try:
            assert fleet.inference is not None
            publisher = Publisher(config=config, train=fleet.train, inference=fleet.inference)
            await publisher.publish(0)
            evaluator = Evaluator(config=config, workers=fleet.rollout)
            evaluator.start(0)
            metrics = await evaluator.finish()
            assert metrics is not None
            return RunResult(status="done", steps=0, metrics=metrics, run_dir=config.run_dir.absolute())
        finally:
            await fleet.close()
    finally:
        stop.uninstall()
        await asyncio.to_thread(leave_cluster, cluster)
