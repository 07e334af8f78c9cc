"""Pictures as numbers: where shapes stand, in percent of the picture's width and height.

The templates draw them in SVG with classes for colours, so that they follow the page's light or dark scheme, print,
and grow with the page. Percentages have two decimals: more would not be seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.cli.reports.quantities import metric_text, metric_title

# Room right of the largest value.
_ROOM = 1.06
# Steps of an axis that are easy to read.
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOST_TICKS = 5
_FULL = 100.0
# Classes of colour in the style sheet.
COLOURS = 8
# Curves are drawn in a picture of this many units.
_UNITS = 1000.0


def share(part: float, whole: float) -> float:
    """Percent of a whole, 0 … 100.

    >>> share(1, 3), share(5, 0)
    (33.33, 0.0)
    """
    return round(min(max(part / whole, 0.0), 1.0) * _FULL, 2) if whole > 0 and math.isfinite(part) else 0.0


def ticks(most: float) -> list[float]:
    """Round values from 0 up to ``most``, at most six.

    >>> ticks(93)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    if not (most > 0 and math.isfinite(most)):
        return [0.0]
    least = most / _MOST_TICKS
    decade = 10.0 ** math.floor(math.log10(least))
    step = next(step * decade for step in _STEPS if step * decade >= least * (1 - 1e-9))
    return [step * place for place in range(int(most / step + 1e-9) + 1)]


def interval(name: str, ends: Mapping[str, float], limit: float | None = None) -> dict[str, Any]:
    """A predicted metric as a line with a dot, on a scale that begins at 0.

    Args:
        name: of the metric.
        ends: value, low, high.
        limit: its SLO.
    """
    most = max(ends["high"], ends["value"], limit or 0.0) * _ROOM
    spread = ends["low"] != ends["high"]
    return {
        "metric": name,
        "title": metric_title(name),
        "expected": metric_text(name, ends["value"]),
        "low": metric_text(name, ends["low"]) if spread else "",
        "high": metric_text(name, ends["high"]) if spread else "",
        "limit": None if limit is None else metric_text(name, limit),
        "is_met": limit is None or ends["value"] <= limit,
        "value_at": share(ends["value"], most),
        "low_at": share(ends["low"], most),
        "high_at": share(ends["high"], most),
        "limit_at": None if limit is None else share(limit, most),
    }


def stacked(parts: Sequence[tuple[str, float, str]], whole: float, order: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Parts one after the other, as in a bar of memory.

    Args:
        parts: (name, size, size as text).
        whole: what the full width stands for.
        order: names of the parts of all bars, so that one name has one colour.
    """
    names = list(order or [name for name, _, _ in parts])
    found, start = [], 0.0
    for name, size, text in parts:
        width = round(min(share(size, whole), _FULL - start), 2)
        colour = names.index(name) % COLOURS
        found.append({"name": name, "text": text, "at": round(start, 2), "width": width, "colour": colour})
        start += width
    return found


def scatter(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Where points stand, and what the axes show."""
    most_x, most_y = (max((point[axis] for point in points), default=1.0) * _ROOM for axis in (0, 1))
    return {
        "points": [{"x": share(x, most_x), "y": _FULL - share(y, most_y)} for x, y in points],
        "x_ticks": [{"at": share(value, most_x), "text": f"{value:,.4g}"} for value in ticks(most_x)],
        "y_ticks": [{"at": _FULL - share(value, most_y), "text": f"{value:,.4g}"} for value in ticks(most_y)],
        "most_x": most_x,
        "most_y": most_y,
    }


def curve(xs: Sequence[float], ys: Sequence[float], most_y: float) -> str:
    """Points of a polyline in a picture of 1000 × 1000 units."""
    last = xs[-1] if xs else 1.0
    return " ".join(
        f"{share(x, last) / _FULL * _UNITS:.1f},{_UNITS - share(y, most_y) / _FULL * _UNITS:.1f}"
        for x, y in zip(xs, ys, strict=True)
    )
