"""Learning rate over optimizer steps, as a factor of the peak."""

import math

from rayrl.config.training import ScheduleConfig


def lr_factor(step: int, config: ScheduleConfig, num_steps: int) -> float:
    """Return the factor of the optimizer step number `step`, counted from 0.

        warm-up   (step + 1) / warmup_steps
        then      1;  1 - (1 - min_ratio) p;  min_ratio + (1 - min_ratio) (1 + cos(pi p)) / 2

    with p from 0 at the first step after the warm-up to 1 at the last of `num_steps`. Later steps keep the last factor
    (after a resume with a longer run, say).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.type == "constant":
        return 1.0
    progress = min((step - config.warmup_steps) / max(num_steps - 1 - config.warmup_steps, 1), 1.0)
    remaining = 1 - progress if config.type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_ratio + (1 - config.min_ratio) * remaining
