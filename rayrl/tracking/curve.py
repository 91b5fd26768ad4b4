"""A curve in one line of text."""

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return a curve of at most `width` characters, lowest to highest value; each is the mean of its share of values.

    Values that are not finite are left out of the means; a share without any is a blank. A constant is a low line.
    Example: `sparkline([0.0, 0.5, 1.0])` is `▁▄█`.
    """
    assert width > 0, "width counts characters"
    columns = min(width, len(values))
    means: list[float | None] = []
    for column in range(columns):
        share = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        finite = [value for value in share if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * columns
    low, high = min(known), max(known)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else _BARS[int((mean - low) * scale)] for mean in means)
