"""Pictures of measurements: bandwidth matrices and efficiency curves, for the terminal and as one HTML file.

Shades run from the slowest to the fastest on a logarithmic scale, because one slow link among many fast ones is what
one looks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from meshplan.catalogs.drawing import MUTED, SHADES, Axis, Drawing, Plot, heat_map, html_list, html_page, shade
from meshplan.catalogs.measurements.types import ClusterProfile, Measurement, Metric, ProfileRun
from meshplan.catalogs.units import format_bandwidth, format_flops

WIDTH, HEIGHT, MARGIN = 560, 260, 80

Matrix = Sequence[Sequence[float | None]]


def terminal_matrix(profile: ClusterProfile) -> str:
    """The directed matrix with shades, rows send and columns receive, in MB/s."""
    matrix = profile.bandwidths()
    axis = _axis(matrix)
    width = max((len(name) for name in profile.endpoints), default=4)
    column = max(9, width)
    lines = [
        "MB/s, rows send, columns receive",
        " " * width + "".join(f" {name:>{column}}" for name in profile.endpoints),
    ]
    for name, row in zip(profile.endpoints, matrix, strict=True):
        cells = "".join(f" {_terminal_cell(value, axis, column)}" for value in row)
        lines.append(f"{name:<{width}}{cells}")
    return "\n".join([*lines, "", *profile.findings])


def _axis(matrix: Matrix) -> Axis:
    return Axis.log_over([value for row in matrix for value in row if value is not None])


def _terminal_cell(value: float | None, axis: Axis, width: int) -> str:
    if value is None:
        return f"{'·':>{width}}"
    return f"{SHADES[round(axis(value) * (len(SHADES) - 1))]}{value / 1e6:>{width - 1}.1f}"


def cluster_page(profile: ClusterProfile) -> str:
    """A heat map per rail, with the findings, as an HTML page."""
    body = f"<p>{escape(profile.measured_at)}, rows send, columns receive</p>\n"
    for rail in profile.rails:
        matrix = profile.bandwidths(rail)
        picture = heat_map(profile.endpoints, matrix, _axis(matrix), format_bandwidth)
        body += f"<h2>rail {escape(rail)}</h2>\n{picture}"
    return html_page(f"Links of {profile.name}", body + html_list(profile.findings or ["no anomalies"]))


def device_page(run: ProfileRun, measurements: Sequence[Measurement]) -> str:
    """One chart per probe and precision: rate over work, with the spread, as an HTML page."""
    body = f"<p>{escape(run.started_at)}, host {escape(run.host)}, median and 10 % to 90 % of the repeats</p>\n"
    for probe, dtype in dict.fromkeys((row.probe, row.dtype) for row in measurements):
        rows = [row for row in measurements if (row.probe, row.dtype) == (probe, dtype)]
        if len(rows) > 1 and rows[0].metric is not Metric.LATENCY_S:
            body += f"<h2>{escape(f'{probe} {dtype or str()}'.strip())}</h2>\n{_chart(rows)}"
    return html_page(str(measurements[0].device if measurements else run.host), body)


def _chart(rows: Sequence[Measurement]) -> Drawing:
    rows = sorted(rows, key=_work)
    text = format_flops if rows[0].metric is Metric.FLOPS_PER_S else format_bandwidth
    drawing = Drawing(WIDTH, HEIGHT)
    top = max(row.spread.high for row in rows)
    work = Axis.log_over([_work(row) for row in rows])
    plot = Plot(drawing, work, Axis(0.0, top), MARGIN + 10, 10, WIDTH - 20, HEIGHT - 50)
    drawing.rect(MARGIN, 10, WIDTH - MARGIN - 10, HEIGHT - 60, fill="none", stroke=MUTED)
    for row in rows:
        low, middle, high = (
            plot.at(_work(row), value) for value in (row.spread.low, row.spread.value, row.spread.high)
        )
        hint = f"{_shape(row)}: {text(row.spread.value)}"
        drawing.line(low, high, hint=hint, stroke=MUTED)
        drawing.circle(*middle, 4, hint=hint, fill=shade(1.0))
    drawing.text(MARGIN - 4, 20, text(top), anchor="end")
    drawing.text(MARGIN - 4, HEIGHT - 50, "0", anchor="end")
    drawing.text(MARGIN, HEIGHT - 30, _shape(rows[0]))
    drawing.text(WIDTH - 10, HEIGHT - 14, _shape(rows[-1]), anchor="end")
    return drawing


def _work(row: Measurement) -> float:
    """The size, or the product of the shape: what orders the points of a probe."""
    return float(math.prod(value for value in row.parameters.values() if isinstance(value, int | float)))


def _shape(row: Measurement) -> str:
    return " ".join(f"{name}={value}" for name, value in row.parameters.items())
