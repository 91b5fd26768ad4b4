"""Config files as commands take them: which of the kinds a file is, and the parsed config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml

from rayrl.config.run import RunConfig
from rayrl.config.supervised import PreferenceRunConfig, RewardModelRunConfig, SFTRunConfig
from rayrl.errors import ConfigError

ConfigKind = Literal["run", "sft", "preference", "reward_model"]
AnyConfig = RunConfig | SFTRunConfig | PreferenceRunConfig | RewardModelRunConfig

CONFIGS: dict[ConfigKind, type[AnyConfig]] = {
    "run": RunConfig,
    "sft": SFTRunConfig,
    "preference": PreferenceRunConfig,
    "reward_model": RewardModelRunConfig,
}
"""The class of each kind. All kinds but `run` have a section of their own name."""
COMMANDS: dict[ConfigKind, str] = {
    "run": "train",
    "sft": "sft",
    "preference": "preference",
    "reward_model": "reward-model",
}
"""The command that takes each kind."""


def config_kind(path: Path) -> ConfigKind:
    """Return the kind of a file by its sections; `run` also where the file cannot be read or parsed."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return "run"
    if not isinstance(data, dict):
        return "run"
    return next((kind for kind in CONFIGS if kind in data and kind != "run"), "run")


def load_any_config(path: Path, overrides: Sequence[str]) -> AnyConfig:
    """Parse a file of any kind. Raises ConfigError."""
    return CONFIGS[config_kind(path)].load(path, overrides)


def load_run_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Parse the config of an RL run. Raises ConfigError, also for a config of another kind."""
    _refuse_others(path, "run")
    return RunConfig.load(path, overrides)


def load_sft_config(path: Path, overrides: Sequence[str]) -> SFTRunConfig:
    """Parse the config of an SFT run. Raises ConfigError."""
    return SFTRunConfig.load(path, overrides)


def load_preference_config(path: Path, overrides: Sequence[str]) -> PreferenceRunConfig:
    """Parse the config of a preference run. Raises ConfigError, also for a config of another kind."""
    _refuse_others(path, "preference")
    return PreferenceRunConfig.load(path, overrides)


def load_reward_model_config(path: Path, overrides: Sequence[str]) -> RewardModelRunConfig:
    """Parse the config of a reward model. Raises ConfigError, also for a config of another kind."""
    _refuse_others(path, "reward_model")
    return RewardModelRunConfig.load(path, overrides)


def _refuse_others(path: Path, kind: ConfigKind) -> None:
    found = config_kind(path)
    if found not in (kind, "run"):
        raise ConfigError(f"{str(path)!r} has a {found!r} section: it is a config of `rayrl {COMMANDS[found]}`")
