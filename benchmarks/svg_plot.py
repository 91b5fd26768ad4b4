"""A line plot as SVG text, without a plotting library: lines through means, dots for single values."""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

Points = Mapping[float, Sequence[float]]
"""x -> the values measured there."""

COLOURS = ("#1b6ca8", "#d1495b", "#2e7d32", "#8a5a00")
WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 56


def line_plot(
    lines: Mapping[str, Points], *, title: str, x_label: str, y_label: str, y_range: tuple[float, float]
) -> str:
    """Return an SVG image. The values of x stand at equal distances, in ascending order.

    Args:
        lines: name -> points; a line goes through the means, each value is a dot.
        y_range: what the y axis spans; values outside are drawn at its ends.
    """
    places = sorted({x for points in lines.values() for x in points})
    step = (WIDTH - LEFT - RIGHT) / max(len(places), 1)
    x_of = {x: LEFT + (index + 0.5) * step for index, x in enumerate(places)}
    parts = [*_frame(title, x_label, y_label), *_axes(x_of, y_range)]
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        # Side by side, so that equal values of two lines do not hide each other.
        shift = 6 * (number - (len(lines) - 1) / 2)
        course = [(x_of[x] + shift, _y(fmean(values), y_range)) for x, values in sorted(points.items())]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in course)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x_of[x] + shift:.1f}" cy="{_y(value, y_range):.1f}" r="3.5" fill="{colour}" opacity="0.65"/>'
            for x, values in points.items()
            for value in values
        ]
        y = HEIGHT - BOTTOM - 14 - 18 * (len(lines) - 1 - number)
        parts.append(f'<rect x="{LEFT + 12}" y="{y - 5}" width="18" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 36}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _y(value: float, y_range: tuple[float, float]) -> float:
    low, high = y_range
    share = min(max((value - low) / (high - low), 0.0), 1.0)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{escape(y_label)}</text>',
    ]


def _axes(x_of: Mapping[float, float], y_range: tuple[float, float]) -> list[str]:
    low, high = y_range
    parts = []
    for index in range(6):
        value = low + index * (high - low) / 5
        y = _y(value, y_range)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for x, place in x_of.items():
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x:g}</text>')
    return parts
