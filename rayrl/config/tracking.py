"""Where metrics and trajectories go."""

from typing import Literal

from rayrl.config.base import Section


class WandbConfig(Section):
    """Weights & Biases; needs `pip install 'rayrl[wandb]'`."""

    project: str = "rayrl"
    """Project name."""
    entity: str | None = None
    """Team or user; the default of the account when empty."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """`auto` is online with a key and offline without one."""


class TrackingConfig(Section):
    """Where metrics go."""

    sinks: tuple[Literal["console", "jsonl", "wandb"], ...] = ("console", "jsonl")
    """Sinks of metrics; `jsonl` is `metrics.jsonl` in the run's folder."""
    wandb: WandbConfig = WandbConfig()
    """Settings of the wandb sink."""
    rollout_log: bool = True
    """Write every consumed trajectory to Parquet files in the run's folder."""
