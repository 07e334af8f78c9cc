"""Predicted against measured as a picture: a self-contained SVG with logarithmic axes and the line of equality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

SIZE, MARGIN = 480, 56
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run: measured and predicted value (same unit, above 0), a label for the tooltip, a series for the colour."""

    measured: float
    predicted: float
    label: str
    series: str


def scatter_svg(points: Sequence[Point], *, title: str, unit: str) -> str:
    """The picture as SVG text.

    Args:
        points: at least one.
        title: above the picture.
        unit: of both axes.
    """
    values = [value for point in points for value in (point.measured, point.predicted) if value > 0]
    low, high = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))) if values else (0, 1)
    high = max(high, low + 1)
    span = SIZE - 2 * MARGIN

    def x(value: float) -> float:
        return MARGIN + span * (math.log10(value) - low) / (high - low)

    def y(value: float) -> float:
        return SIZE - x(value)

    series = list(dict.fromkeys(point.series for point in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE + 180}" height="{SIZE}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for decade in range(low, high + 1):
        at = 10.0**decade
        parts.append(f'<path d="M{x(at):.1f} {y(10.0**low):.1f}V{y(10.0**high):.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<path d="M{x(10.0**low):.1f} {y(at):.1f}H{x(10.0**high):.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{x(at):.1f}" y="{SIZE - MARGIN + 16}" text-anchor="middle">{at:g}</text>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{at:g}</text>')
    ends = 10.0**low, 10.0**high
    parts.append(f'<path d="M{x(ends[0]):.1f} {y(ends[0]):.1f}L{x(ends[1]):.1f} {y(ends[1]):.1f}" stroke="#888"/>')
    for point in points:
        if min(point.measured, point.predicted) <= 0:
            continue
        colour = COLOURS[series.index(point.series) % len(COLOURS)]
        parts.append(
            f'<circle cx="{x(point.measured):.1f}" cy="{y(point.predicted):.1f}" r="3" fill="{colour}" '
            f'fill-opacity="0.75"><title>{escape(point.label)}</title></circle>'
        )
    for index, name in enumerate(series):
        top = MARGIN + 18 * index
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<circle cx="{SIZE - MARGIN + 24}" cy="{top}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{SIZE - MARGIN + 34}" y="{top + 4}">{escape(name)}</text>')
    parts.append(f'<text x="{SIZE / 2}" y="{SIZE - 12}" text-anchor="middle">measured, {escape(unit)}</text>')
    parts.append(
        f'<text x="16" y="{SIZE / 2}" text-anchor="middle" transform="rotate(-90 16 {SIZE / 2})">'
        f"predicted, {escape(unit)}</text></svg>"
    )
    return "\n".join(parts) + "\n"
