"""Predicted against measured as a picture: a self-contained SVG with logarithmic axes and the line of equality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.catalogs.drawing import MUTED, PALETTE, Axis, Drawing, Plot

SIZE, MARGIN, LEGEND_WIDTH = 480, 56, 180


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
        points: runs; those with a value of 0 are left out.
        title: above the picture.
        unit: that of both axes.
    """
    drawing = Drawing(SIZE + LEGEND_WIDTH, SIZE)
    drawing.heading(MARGIN, title)
    axis = Axis.decades([value for point in points for value in (point.measured, point.predicted) if value > 0])
    plot = Plot(drawing, axis, axis, MARGIN, MARGIN, SIZE - MARGIN, SIZE - MARGIN)
    plot.mark_x("{:g}".format)
    plot.mark_y("{:g}".format)
    plot.name_axes(f"measured, {unit}", f"predicted, {unit}")
    drawing.line(plot.at(axis.low, axis.low), plot.at(axis.high, axis.high), stroke=MUTED)
    series = list(dict.fromkeys(point.series for point in points))
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(series)}
    for point in points:
        if min(point.measured, point.predicted) > 0:
            place = plot.at(point.measured, point.predicted)
            drawing.circle(*place, 3, hint=point.label, fill=colours[point.series], fill_opacity=0.75)
    drawing.legend(SIZE - MARGIN + 20, MARGIN, colours.items(), step=(0, 18))
    return str(drawing)
