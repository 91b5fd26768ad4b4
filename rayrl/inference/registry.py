"""The inference engines by the name that `inference.engine.type` gives them."""

from collections.abc import Callable

from rayrl.inference.engine import InferenceEngine
from rayrl.inference.settings import EngineSettings


def _transformers(settings: EngineSettings, name: str, seed: int) -> InferenceEngine:
    from rayrl.inference.embedded import embedded_engine, load_model

    return embedded_engine(
        lambda: load_model(settings.model),
        settings.inference,
        name=name,
        seed=seed,
        deterministic=settings.deterministic,
    )


def _scripted(settings: EngineSettings, name: str, seed: int) -> InferenceEngine:
    from rayrl.inference.scripted import make_scripted_engine

    return make_scripted_engine(settings.inference, name=name, seed=seed)


def _vllm(settings: EngineSettings, name: str, seed: int) -> InferenceEngine:
    from rayrl.inference.vllm_engine import make_vllm_engine

    return make_vllm_engine(settings.model, settings.inference, name=name, seed=seed)


ENGINES: dict[str, Callable[[EngineSettings, str, int], InferenceEngine]] = {
    "transformers": _transformers,
    "scripted": _scripted,
    "vllm": _vllm,
}
"""Each takes the settings, the engine's name and its seed. What an engine is built on is imported only when chosen."""


def make_engine(settings: EngineSettings, *, name: str, seed: int) -> InferenceEngine:
    """Return the engine that the settings choose, not started yet."""
    return ENGINES[settings.inference.engine.type](settings, name, seed)
