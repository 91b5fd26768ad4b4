"""The critic beside the policy: a model of its own with its own optimizer, on the same training workers.

One step: values of the batch ─> advantages and returns by GAE, on tokens ─> optimizer steps of the critic on the same
trajectories as the policy's, `critic.epochs` times.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rayrl.config.critic import CriticConfig
from rayrl.training.batch import TrainBatch
from rayrl.training.engine import TrainEngine, TrainEngineSettings
from rayrl.training.registry import make_train_engine
from rayrl.training.settings import TrainWorkerSettings
from rayrl.training.value_loss import ValueLoss, value_metrics

if TYPE_CHECKING:
    import torch

_FOLDER = "critic"


class Critic:
    """A training engine with a scalar head. Methods are collective, as those of the engine."""

    def __init__(self, engine: TrainEngine, config: CriticConfig) -> None:
        self._engine = engine
        self._config = config

    def add_values(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the values of its loss-carrying tokens."""
        return replace(batch, values=self._engine.forward_values(batch))

    def train(self, batch: TrainBatch, parts: Sequence[TrainBatch]) -> dict[str, float]:
        """Make `epochs` optimizer steps on each part of the batch, which has values and returns; return metrics."""
        metrics = value_metrics(batch)
        loss_fn = ValueLoss(self._config.clip)
        steps = [self._engine.train_step(part, loss_fn) for _ in range(self._config.epochs) for part in parts]
        return metrics | {
            "critic/loss": sum(step.loss for step in steps) / len(steps),
            "critic/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
            "critic/lr": steps[-1].lr,
            "critic/optimizer_steps_skipped": float(sum(step.skipped for step in steps)),
        }

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Copy the critic's state and return what writes it below the training state in `folder`."""
        return self._engine.begin_save(folder / _FOLDER)

    def save(self, folder: Path) -> None:
        """Write the critic's state below the training state in `folder`."""
        self._engine.save(folder / _FOLDER)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self._engine.load(folder / _FOLDER)


def make_critic(settings: TrainWorkerSettings, *, rank: int, world_size: int, device: "torch.device") -> Critic | None:
    """Return the critic of a run, None if its algorithm has none. A collective call; ModelError as for any model."""
    config = None if settings.algorithm is None else settings.algorithm.critic
    if config is None:
        return None
    training, model = settings.training, settings.model
    if config.lr is not None:
        optimizer = training.optimizer.model_copy(update={"lr": config.lr})
        training = training.model_copy(update={"optimizer": optimizer})
    if config.path is not None:
        model = model.model_copy(update={"path": config.path})
    engine = make_train_engine(
        TrainEngineSettings(
            model=model,
            training=training,
            rank=rank,
            world_size=world_size,
            temperature=1.0,
            num_steps=settings.num_steps * config.epochs,
            device=device,
            head="scalar",
        )
    )
    return Critic(engine, config)
