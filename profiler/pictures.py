"""Pictures of what was measured: the bandwidth matrix and efficiency curves, for the terminal and as one HTML file.

The HTML holds plain SVG and no script, font or address, so that it can be mailed and opened anywhere. Colours run from
white (the slowest) to dark blue (the fastest) on a logarithmic scale, because one slow link among many fast ones is
what one looks for; the number stands in each cell, so nothing depends on telling colours apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from meshplan.catalogs.measurements.types import ClusterProfile, Measurement, Metric, ProfileRun
from meshplan.catalogs.units import format_bandwidth, format_flops

SHADES = " ░▒▓█"
CELL_PX, LABEL_PX, FONT_PX = 56, 110, 12
CHART_WIDTH_PX, CHART_HEIGHT_PX, MARGIN_PX = 560, 260, 60
# Larger matrices get no numbers in their cells, which would not be legible.
MAX_NUMBERED = 32
_LIGHT, _DARK = (255, 255, 255), (8, 48, 107)
_HALF = 0.5


def terminal_matrix(profile: ClusterProfile) -> str:
    """The directed matrix with shades, rows send and columns receive, in MB/s."""
    matrix = profile.bandwidths()
    scale = _Scale([value for row in matrix for value in row if value is not None])
    width = max((len(name) for name in profile.endpoints), default=4)
    column = max(9, width)
    lines = [
        "MB/s, rows send, columns receive",
        " " * width + "".join(f" {name:>{column}}" for name in profile.endpoints),
    ]
    for name, row in zip(profile.endpoints, matrix, strict=True):
        cells = "".join(f" {_terminal_cell(value, scale, column)}" for value in row)
        lines.append(f"{name:<{width}}{cells}")
    return "\n".join([*lines, "", *profile.findings])


def cluster_page(profile: ClusterProfile) -> str:
    """A heat map for each rail, with the findings, as an HTML page."""
    parts = [_heat_map(profile, rail) for rail in profile.rails]
    findings = "".join(f"<li>{escape(line)}</li>" for line in profile.findings) or "<li>nothing odd</li>"
    body = f"<p>{escape(profile.measured_at)}, rows send, columns receive</p>{''.join(parts)}<ul>{findings}</ul>"
    return _page(f"Links of {profile.name}", body)


def device_page(run: ProfileRun, measurements: Sequence[Measurement]) -> str:
    """One chart per probe and precision: rate over work, with the spread, as an HTML page."""
    charts = []
    for probe, dtype in dict.fromkeys((row.probe, row.dtype) for row in measurements):
        rows = [row for row in measurements if (row.probe, row.dtype) == (probe, dtype)]
        if len(rows) > 1 and rows[0].metric is not Metric.LATENCY_S:
            charts.append(_chart(f"{probe} {dtype or ''}".strip(), rows))
    title = measurements[0].device if measurements else run.host
    body = f"<p>{escape(run.started_at)}, host {escape(run.host)}, median and 10 % to 90 % of the repeats</p>"
    return _page(str(title), body + "".join(charts))


class _Scale:
    """Position of a value between the smallest and the largest, 0 … 1, logarithmic."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = (min(values), max(values)) if values else (1.0, 1.0)

    def __call__(self, value: float) -> float:
        if self.high <= self.low:
            return 1.0
        return math.log(value / self.low) / math.log(self.high / self.low)


def _terminal_cell(value: float | None, scale: _Scale, width: int) -> str:
    if value is None:
        return f"{'·':>{width}}"
    shade = SHADES[round(scale(value) * (len(SHADES) - 1))]
    return f"{shade}{value / 1e6:>{width - 1}.1f}"


def _heat_map(profile: ClusterProfile, rail: str) -> str:
    matrix = profile.bandwidths(rail)
    scale = _Scale([value for row in matrix for value in row if value is not None])
    count = len(profile.endpoints)
    cell = CELL_PX if count <= MAX_NUMBERED else 12
    size = LABEL_PX + count * cell
    shapes = []
    for row, (source, values) in enumerate(zip(profile.endpoints, matrix, strict=True)):
        y = LABEL_PX + row * cell
        shapes.append(_text(LABEL_PX - 6, y + cell / 2 + 4, source, anchor="end"))
        shapes.append(_text(0, 0, source, turn=(LABEL_PX + (row + 0.5) * cell + 4, LABEL_PX - 6)))
        for column, value in enumerate(values):
            shapes.append(
                _cell(LABEL_PX + column * cell, y, cell, value, scale, f"{source} → {profile.endpoints[column]}")
            )
    return f"<h2>rail {escape(rail)}</h2>{_svg(size, size, shapes)}"


def _cell(x: float, y: float, size: float, value: float | None, scale: _Scale, title: str) -> str:
    if value is None:
        return f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="#eee"/>'
    position = scale(value)
    shade = ",".join(str(round(a + (b - a) * position)) for a, b in zip(_LIGHT, _DARK, strict=True))
    shown = format_bandwidth(value)
    ink = "#fff" if position > _HALF else "#000"
    number = _text(x + size / 2, y + size / 2 + 4, shown.replace("B/s", ""), anchor="middle", ink=ink)
    rectangle = f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="rgb({shade})" stroke="#ccc"/>'
    hint = f"<title>{escape(title)}: {shown}</title>"
    return f"<g>{hint}{rectangle}{number if size >= CELL_PX else ''}</g>"


def _chart(title: str, rows: Sequence[Measurement]) -> str:
    points = sorted(((_work(row), row) for row in rows), key=lambda point: point[0])
    horizontal = _Scale([work for work, _ in points])
    top = max(row.spread.high for _, row in points)
    shapes = [
        f'<rect x="{MARGIN_PX}" y="10" width="{CHART_WIDTH_PX - MARGIN_PX - 10}" '
        f'height="{CHART_HEIGHT_PX - MARGIN_PX}" fill="none" stroke="#999"/>'
    ]
    text = format_flops if rows[0].metric is Metric.FLOPS_PER_S else format_bandwidth
    for work, row in points:
        x = MARGIN_PX + 10 + horizontal(work) * (CHART_WIDTH_PX - MARGIN_PX - 40)
        low, middle, high = (_height(value, top) for value in (row.spread.low, row.spread.value, row.spread.high))
        hint = f"{_shape(row)}: {text(row.spread.value)}"
        shapes.append(
            f'<g><title>{escape(hint)}</title><line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" '
            f'stroke="#888"/><circle cx="{x:.1f}" cy="{middle:.1f}" r="4" fill="rgb(8,48,107)"/></g>'
        )
    shapes.append(_text(MARGIN_PX - 4, 20, text(top), anchor="end"))
    shapes.append(_text(MARGIN_PX - 4, CHART_HEIGHT_PX - MARGIN_PX + 10, "0", anchor="end"))
    first, last = points[0][1], points[-1][1]
    shapes.append(_text(MARGIN_PX, CHART_HEIGHT_PX - 30, _shape(first)))
    shapes.append(_text(CHART_WIDTH_PX - 10, CHART_HEIGHT_PX - 14, _shape(last), anchor="end"))
    return f"<h2>{escape(title)}</h2>{_svg(CHART_WIDTH_PX, CHART_HEIGHT_PX, shapes)}"


def _work(row: Measurement) -> float:
    """What orders the points of a probe: the size, or the product of the shape."""
    return float(math.prod(value for value in row.parameters.values() if isinstance(value, int | float)))


def _shape(row: Measurement) -> str:
    return " ".join(f"{name}={value}" for name, value in row.parameters.items())


def _height(value: float, top: float) -> float:
    return 10 + (1.0 - value / top) * (CHART_HEIGHT_PX - MARGIN_PX)


def _text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    ink: str = "#000",
    turn: tuple[float, float] | None = None,
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}"'
    if turn is not None:
        place = f'transform="translate({turn[0]:.1f},{turn[1]:.1f}) rotate(-90)"'
    return f'<text {place} text-anchor="{anchor}" fill="{ink}" font-size="{FONT_PX}">{escape(content)}</text>'


def _svg(width: float, height: float, shapes: Sequence[str]) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    )
    return f'{opening} font-family="sans-serif" role="img">{"".join(shapes)}</svg>'


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
        f'<body style="font-family:sans-serif"><h1>{escape(title)}</h1>{body}</body></html>\n'
    )
