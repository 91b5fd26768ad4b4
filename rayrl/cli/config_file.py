"""Config files as commands take them: which of the two kinds a file is, and the parsed config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml

from rayrl.config.run import RunConfig, SFTRunConfig
from rayrl.errors import ConfigError

ConfigKind = Literal["run", "sft"]


def config_kind(path: Path) -> ConfigKind:
    """Return `sft` for a file with an `sft` section, else `run`, also where the file cannot be read or parsed."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return "run"
    return "sft" if isinstance(data, dict) and "sft" in data else "run"


def load_any_config(path: Path, overrides: Sequence[str]) -> RunConfig | SFTRunConfig:
    """Parse a file of either kind. Raises ConfigError."""
    return SFTRunConfig.load(path, overrides) if config_kind(path) == "sft" else RunConfig.load(path, overrides)


def load_run_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Parse the config of an RL run. Raises ConfigError, also for a config of the other kind."""
    if config_kind(path) == "sft":
        raise ConfigError(f"{str(path)!r} has an 'sft' section: it is a config of `rayrl sft`")
    return RunConfig.load(path, overrides)


def load_sft_config(path: Path, overrides: Sequence[str]) -> SFTRunConfig:
    """Parse the config of an SFT run. Raises ConfigError."""
    return SFTRunConfig.load(path, overrides)
