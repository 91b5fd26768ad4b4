"""Metrics of a part of a step, and how those of micro-batches and ranks become one: sums add up, maxima are compared.

Means are sums over live tokens until the very end, because a mean of means depends on how a batch is cut.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

NUM_TOKENS = "num_tokens"
COUNTS = ("nonfinite/",)
"""Prefixes of sums that stay counts where the others become means per token."""


def is_maximum(name: str) -> bool:
    """Return whether a metric is a maximum, `section/max_what`; all others are sums."""
    return name.rpartition("/")[2].startswith("max_")


def add_metrics(total: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the metrics of two parts together; a name may be in one of them only. NaN stays NaN."""
    joined = dict(total)
    for name, value in part.items():
        if name not in joined:
            joined[name] = value
        else:
            joined[name] = torch.maximum(joined[name], value) if is_maximum(name) else joined[name] + value
    return joined


def mean_metrics(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return metrics of a whole step with its sums as means per live token; counts and maxima stay as they are.

    All are 0 when no token is live.
    """
    num_tokens = metrics[NUM_TOKENS].clamp(min=1)
    return {
        name: value if name == NUM_TOKENS or is_maximum(name) or name.startswith(COUNTS) else value / num_tokens
        for name, value in metrics.items()
    }
