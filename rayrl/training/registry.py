"""The training engines by the name that `training.engine.type` gives them; the only place that makes one."""

from collections.abc import Callable

from rayrl.training.engine import TrainEngine, TrainEngineSettings


def _fsdp(settings: TrainEngineSettings) -> TrainEngine:
    from rayrl.training.fsdp_engine import FsdpEngine

    return FsdpEngine(settings)


def _deepspeed(settings: TrainEngineSettings) -> TrainEngine:
    from rayrl.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(settings)


TRAIN_ENGINES: dict[str, Callable[[TrainEngineSettings], TrainEngine]] = {"fsdp": _fsdp, "deepspeed": _deepspeed}
"""What an engine is built on is imported only when it is chosen."""


def make_train_engine(settings: TrainEngineSettings) -> TrainEngine:
    """Return one rank of the engine that the settings choose, with the model loaded; a collective call.

    ModelError if the model cannot be loaded, EngineError if the layout does not fit the group.
    """
    return TRAIN_ENGINES[settings.training.engine.type](settings)
