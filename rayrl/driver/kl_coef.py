"""The coefficient of the KL penalty over a run, where it follows a target. Pure; train loop and checkpoints keep it."""

from collections.abc import Mapping
from typing import Any

from rayrl.algorithms.kl_control import adaptive_kl_coef
from rayrl.config.kl import KLConfig
from rayrl.errors import CheckpointError

METRIC = "policy/ref_kl"
STATE_KEY = "kl_coef"


def first_kl_coef(config: KLConfig) -> float | None:
    """Return the coefficient of the first step; None where it is fixed, which the config says."""
    return None if config.adaptive is None else config.coef


def next_kl_coef(config: KLConfig, coef: float | None, metrics: Mapping[str, float], num_samples: int) -> float | None:
    """Return the coefficient of the next step, given that of the last one; None where it is fixed.

    Args:
        metrics: of the step, with `policy/ref_kl` in nats per token; without it the coefficient stays.
        num_samples: trajectories of the step.
    """
    if config.adaptive is None or coef is None:
        return None
    if METRIC not in metrics:
        return coef
    return adaptive_kl_coef(coef, metrics[METRIC], config.adaptive.target, num_samples, config.adaptive.horizon)


def restored_kl_coef(config: KLConfig, state: Mapping[str, Any]) -> float | None:
    """Return the coefficient that a checkpoint's state has; the first one if it has none; None where it is fixed.

    CheckpointError if what is there is no positive number.
    """
    if config.adaptive is None or state.get(STATE_KEY) is None:
        return first_kl_coef(config)
    coef = state[STATE_KEY]
    if not isinstance(coef, int | float) or not coef > 0:
        raise CheckpointError(f"the checkpoint has {STATE_KEY}={coef!r}, which is no coefficient above 0")
    return float(coef)
