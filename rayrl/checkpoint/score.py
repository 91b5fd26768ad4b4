"""The value that a checkpoint's version reached in an evaluation, in a file beside the manifest.

It comes after the checkpoint, or before it is complete, and so is no part of what the manifest seals. A damaged one
counts as none: it decides only what is kept.
"""

import json
import math

SCORE = "score.json"


def score_to_bytes(metric: str, value: float) -> bytes:
    """Return the content of the file."""
    return (json.dumps({"metric": metric, "value": value}) + "\n").encode()


def score_from_bytes(data: bytes, metric: str) -> float | None:
    """Return the value, or None if it is of another metric, not finite, or cannot be read."""
    try:
        found = json.loads(data)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("metric") != metric:
        return None
    value = found.get("value")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
