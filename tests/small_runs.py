"""A run small enough for a test, and its model; each test says only what it changes."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from rayrl import RunConfig
from rayrl.config.loader import parse_section

_SMALL: dict[str, Any] = {
    "run": {"name": "small"},
    "model": {"path": "model"},
    "dataset": {"type": "arithmetic", "num_operands": 2, "max_operand": 4},
    "reward": {"type": "exact_match"},
    "rollout": {
        "workflow": {"type": "single_turn", "prompt_format": "text"},
        "group_size": 2,
        "sampling": {"max_new_tokens": 4},
    },
    "driver": {"groups_per_step": 2, "num_steps": 1},
    "training": {"optimizer": {"lr": 1e-3}},
    "inference": {"engine": {"type": "scripted"}},
}
_REAL: dict[str, Any] = {
    "model__max_context": 24,
    "rollout__group_size": 4,
    "driver__groups_per_step": 4,
    "driver__max_staleness": 2,
    "inference__engine": {"type": "transformers", "max_batch_size": 16},
    "tracking": {"sinks": ["jsonl"]},
}


def small_config(**changes: Any) -> RunConfig:
    """Return a run of sums of two numbers that is never started; `changes` are paths with `__` for the dot."""
    data = deepcopy(_SMALL)
    for path, value in changes.items():
        *sections, key = path.split("__")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return parse_section(RunConfig, data)


def small_run(model: Path, root: Path, **changes: Any) -> RunConfig:
    """Return a run that can be started: four groups of four a step, one embedded engine, below `root`."""
    places = {"run__output_root": str(root), "model__path": str(model)}
    return small_config(**{**_REAL, **places, **changes})


def make_small_model(folder: Path, *, hidden_size: int = 32, **sizes: Any) -> Path:
    """Write a model whose step takes a fraction of a second."""
    from rayrl.models.tiny import create_tiny_model

    return create_tiny_model(
        folder,
        alphabet="0123456789+=",
        hidden_size=hidden_size,
        **{"num_layers": 2, "num_heads": 2, "intermediate_size": 2 * hidden_size, "max_context": 32, **sizes},
    )
