"""Which changes of the config a resumed run may have. Pure.

Both configs must be resolved by this version of rayrl (`RunConfig.model_dump(mode="json")`), so that a field that is
new since the run began has its default on both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayrl.errors import CheckpointError

UNSET = "(not set)"

ALLOWED: dict[str, str] = {
    "run.name": "a moved folder",
    "run.output_root": "a moved folder",
    "driver.num_steps": "a longer or shorter run",
    "sft.num_steps": "a longer or shorter run",
    "preference.num_steps": "a longer or shorter run",
    "reward_model.num_steps": "a longer or shorter run",
    "dataset.epochs": "a longer or shorter run",
    "driver.deadlines": "waits",
    "sft.deadlines": "waits",
    "preference.deadlines": "waits",
    "reward_model.deadlines": "waits",
    "driver.max_failed_groups": "budgets",
    "driver.max_skipped_steps": "budgets",
    "driver.max_failure_share": "budgets",
    "supervision": "what happens when processes fail",
    "inference": "engines are filled with the saved weights, however many there are",
    "evaluation": "does not touch the training",
    "checkpoint": "what is kept",
    "tracking": "what is shown",
    "debug": "diagnosis",
    "placement": "where processes run",
    "transfer": "how weights travel",
    "rollout.num_workers": "where episodes run",
    "rollout.episode_timeout_s": "waits",
    "rollout.max_attempts": "budgets",
    "training.parallel": "the update is the same however the batch is laid out",
    "training.micro_batch_tokens": "the update is the same however the batch is laid out",
    "training.cpus_per_worker": "where processes run",
    "training.gpus_per_worker": "where processes run",
    "training.threads_per_worker": "where processes run",
    "training.engine.activation_checkpointing": "memory against time",
    "training.engine.logprob_chunk_tokens": "memory against time",
}
"""Fields, or sections with all below them, that may differ, and why that leaves the run what it was. All others are
refused: the model, the data and their order, the objective, the optimizer, and the bounds of staleness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field that two configs do not share. Example: `driver.num_steps: 20 -> 40`."""

    path: str
    old: Any
    new: Any
    allowed: bool

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}"


def differences(old_config: Mapping[str, Any], new_config: Mapping[str, Any]) -> list[Difference]:
    """Return the fields that differ, by dotted path in alphabetical order; a field that one side lacks is `UNSET`."""
    old, new = _flatten(old_config), _flatten(new_config)
    return [
        Difference(
            path=path, old=old.get(path, UNSET), new=new.get(path, UNSET), allowed=reason_allowed(path) is not None
        )
        for path in sorted(old.keys() | new.keys())
        if old.get(path, UNSET) != new.get(path, UNSET)
    ]


def check_compatible(old_config: Mapping[str, Any], new_config: Mapping[str, Any]) -> list[Difference]:
    """Return the differences, all of them allowed. CheckpointError lists each that is not, with old and new value."""
    found = differences(old_config, new_config)
    refused = [item for item in found if not item.allowed]
    if refused:
        lines = "\n  ".join(str(item) for item in refused)
        raise CheckpointError(
            f"this run cannot be resumed with another config; set these back, or choose another run.name:\n  {lines}\n"
            f"what may differ:\n  {_allowed_lines(new_config)}"
        )
    return found


def _allowed_lines(config: Mapping[str, Any]) -> str:
    """Return the fields that may differ, a line for each reason; of sections that this kind of config has."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in ALLOWED.items():
        if path.partition(".")[0] in config:
            by_reason.setdefault(reason, []).append(path)
    return "\n  ".join(f"{', '.join(paths)} ({reason})" for reason, paths in by_reason.items())


def reason_allowed(path: str) -> str | None:
    """Return why a field may differ; None if it may not."""
    parts = path.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((ALLOWED[prefix] for prefix in prefixes if prefix in ALLOWED), None)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{path}."))
        else:
            flat[path] = list(value) if isinstance(value, tuple) else value
    return flat
