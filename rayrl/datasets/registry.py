"""Which class reads which `dataset.type`."""

from collections.abc import Callable
from typing import Any

from rayrl.config.dataset import DatasetConfig
from rayrl.datasets.arithmetic import ArithmeticSource
from rayrl.datasets.huggingface import HuggingFaceSource
from rayrl.datasets.jsonl import JsonlSource
from rayrl.datasets.parquet import ParquetSource
from rayrl.datasets.reasoning_gym import ReasoningGymSource
from rayrl.datasets.source import PromptSource

SOURCES: dict[str, Callable[[Any], PromptSource]] = {
    "reasoning_gym": ReasoningGymSource,
    "arithmetic": ArithmeticSource,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "huggingface": HuggingFaceSource,
}
"""A new dataset is one file, one config class and one line here."""


def load_source(config: DatasetConfig) -> PromptSource:
    """Return the source that `config` describes. Raises DatasetError or ConfigError if it cannot be read."""
    return SOURCES[config.type](config)
