"""Metrics of the optimizer steps of one training step, as one."""

from collections.abc import Mapping, Sequence

from rayrl.algorithms.sums import COUNTS, NUM_TOKENS, is_maximum


def joined_metrics(steps: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], float]:
    """Return means per token, maxima, and counts that are not 0, of several steps together; and their tokens.

    Example: `joined_metrics([{"num_tokens": 2, "a/b": 4}, {"num_tokens": 2, "a/b": 0}])` is `({"a/b": 1.0}, 4)`.
    """
    num_tokens = sum(step[NUM_TOKENS] for step in steps)
    metrics: dict[str, float] = {}
    for name in steps[0] if steps else ():
        values = [step[name] for step in steps if name in step]
        if name == NUM_TOKENS:
            continue
        if is_maximum(name):
            metrics[name] = max(values)
        elif not name.startswith(COUNTS):
            metrics[name] = sum(values) / max(num_tokens, 1)
        elif any(values):
            metrics[name] = sum(values)
    return metrics, num_tokens
