"""rayrl: reinforcement learning of language models on Ray.

The public names are loaded on first use, so that `import rayrl` stays light: no torch, no ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayrl.config.run import PreferenceRunConfig, RewardModelRunConfig, RunConfig, SFTRunConfig
    from rayrl.driver.pairs import PreferenceRun, RewardModelRun
    from rayrl.driver.result import RunResult
    from rayrl.driver.run import Run
    from rayrl.driver.run_handle import RunHandle
    from rayrl.driver.sft import SFTRun

__version__ = "0.1.0"

_HOMES = {
    "Run": "rayrl.driver.run",
    "RunHandle": "rayrl.driver.run_handle",
    "RunResult": "rayrl.driver.result",
    "RunConfig": "rayrl.config.run",
    "SFTRun": "rayrl.driver.sft",
    "SFTRunConfig": "rayrl.config.run",
    "PreferenceRun": "rayrl.driver.pairs",
    "PreferenceRunConfig": "rayrl.config.run",
    "RewardModelRun": "rayrl.driver.pairs",
    "RewardModelRunConfig": "rayrl.config.run",
}

__all__ = [
    "PreferenceRun",
    "PreferenceRunConfig",
    "RewardModelRun",
    "RewardModelRunConfig",
    "Run",
    "RunConfig",
    "RunHandle",
    "RunResult",
    "SFTRun",
    "SFTRunConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rayrl' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
