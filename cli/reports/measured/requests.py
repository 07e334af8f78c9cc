"""``meshplan validate --requests``: measured and predicted latencies of single requests, as a picture and as a table.

A row of panels for each run: TTFT, TPOT and end-to-end latency, predicted over measured with the line of equality and
the interval that a plan prints shaded around it; then the wait until a request first ran, over its arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshplan.catalogs.drawing import GRID, MUTED, PALETTE, Axis, Drawing, Plot
from meshplan.cli.render import Column, Format
from meshplan.cli.reports.measured.validation import SIGNED, show_validation
from meshplan.cli.reports.quantities import percent

if TYPE_CHECKING:
    from meshplan.planner.core.arrays import FloatArray, IntArray
    from meshplan.planner.serving.measured.requests import ComparedRun, PairedLatency
    from meshplan.planner.validation.summary import Validation

# Requests of a run that are drawn; of longer runs as many, evenly spread, since more points cover each other.
MOST_DRAWN = 2000
NAMES = {"ttft_s": "time to first token", "tpot_s": "time per output token", "latency_s": "end-to-end latency"}
QUEUEING = "queueing"
PANEL, GAP, LEFT, TOP, ROW = 250, 78, 70, 44, 360
MEASURED, PREDICTED = PALETTE[0], PALETTE[1]
_HEAD, _MARK = 62, 2  # from the top of a row to that of its panels; radius of a point
# Lengths of an axis whose fifths are short numbers, as shares of a power of ten.
_SHORT = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.5, 10.0)

COLUMNS = (
    Column(key="id", title="Run"),
    Column(key="metric", title="Metric of requests"),
    Column(key="n", title="n", right=True),
    Column(key="median_ape", title="median", right=True, text=percent),
    Column(key="mape", title="mean", right=True, text=percent),
    Column(key="signed_median", title="signed", right=True, text=SIGNED),
    Column(key="spearman", title="rank correlation", right=True, text="{:.3f}".format),
    Column(key="interval_coverage", title="in interval", right=True, text=percent),
)


def show_requests(result: Validation, runs: Sequence[ComparedRun], form: Format, worst: int) -> None:
    """Print a validation and the errors of single requests; as CSV, which is one table, the latter alone.

    Args:
        result: what was validated.
        runs: those of it that are compared request by request.
        form: how to print.
        worst: rows with the largest error that tables show.
    """
    from meshplan.cli.render import show_rows

    rows = request_rows(runs)
    if form is not Format.CSV:
        show_validation(result, form, worst, extra={"requests": rows})
    if form not in (Format.JSON, Format.YAML):
        show_rows(rows, COLUMNS, form, title="\nRequest by request")


def request_rows(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Errors by run and metric; fractions, the medians of both sides in seconds."""
    return [
        {
            "id": run.id,
            "metric": latency.metric,
            "n": found.n,
            "measured_median_s": float(np.median(latency.measured)),
            "predicted_median_s": float(np.median(latency.predicted)),
            "median_ape": found.median_ape,
            "mape": found.mape,
            "p90_ape": found.p90_ape,
            "signed_median": found.signed_median,
            "spearman": found.spearman,
            "interval_coverage": found.interval_coverage,
        }
        for run in runs
        for latency, found in zip(run.latencies, run.summaries, strict=True)
    ]


def requests_svg(runs: Sequence[ComparedRun]) -> str:
    """The picture as SVG text, a row of panels for each run."""
    names = [*NAMES, *([QUEUEING] if any(run.queueing_s is not None for run in runs) else [])]
    width = LEFT + len(names) * PANEL + (len(names) - 1) * GAP + 20
    title = "Measured and predicted, request by request"
    drawing = Drawing(width, TOP + len(runs) * ROW, title=title, description=_description(runs), font_size=11)
    drawing.heading(LEFT, f"{title}; shaded: the interval that a plan prints")
    for row, run in enumerate(runs):
        _draw_run(drawing, run, TOP + row * ROW)
    return str(drawing)


def _description(runs: Sequence[ComparedRun]) -> str:
    said = [
        f"{row['id']}, {NAMES[row['metric']]} of {row['n']} requests: median error {row['median_ape']:.1%}, "
        f"{row['interval_coverage']:.0%} within the interval"
        for row in request_rows(runs)
    ]
    return "; ".join(["One point a request, predicted over measured, and queueing over the arrival", *said])


def _draw_run(drawing: Drawing, run: ComparedRun, top: float) -> None:
    drawn = _spread(len(run.arrival_s))
    said = f"{len(run.arrival_s):,} requests"
    if len(drawn) < len(run.arrival_s):
        said = f"at most {MOST_DRAWN:,} of {said} in each panel, evenly spread"
    drawing.text(LEFT, top + 16, f"{run.id}: {said}", font_size=13)
    for latency in run.latencies:
        left = LEFT + list(NAMES).index(latency.metric) * (PANEL + GAP)
        _draw_latency(drawing, latency, left, top + _HEAD)
    if run.queueing_s is not None:
        left = LEFT + len(NAMES) * (PANEL + GAP)
        measured, predicted = (waits[drawn] for waits in run.queueing_s)
        _draw_queueing(drawing, run.arrival_s[drawn], measured, predicted, left, top + _HEAD)


def _spread(num: int) -> IntArray:
    """Positions of the requests that are drawn of so many."""
    return np.unique(np.linspace(0, num - 1, min(num, MOST_DRAWN)).round().astype(np.int64))


def _draw_latency(drawing: Drawing, latency: PairedLatency, left: float, top: float) -> None:
    axis = Axis.marked([*latency.measured.tolist(), *latency.predicted.tolist()])
    plot = Plot(drawing, axis, axis, left, top, left + PANEL, top + PANEL)
    low, high, factor = axis.low, axis.high, math.exp(latency.half_width)
    corners = [(low, low), (low, low * factor), (high / factor, high)]
    corners += [(y, x) for x, y in reversed([*corners, (high, high)])]
    shape = " L ".join(f"{x:.2f} {y:.2f}" for x, y in (plot.at(*corner) for corner in corners))
    hint = f"interval of a plan: {1.0 / factor - 1.0:+.0%} to {factor - 1.0:+.0%}"
    drawing.path(f"M {shape} Z", hint=hint, fill=GRID, fill_opacity=0.6)
    plot.mark_x("{:g}".format)
    plot.mark_y("{:g}".format)
    drawing.line(plot.at(low, low), plot.at(high, high), stroke=MUTED)
    for index in _spread(len(latency.measured)):
        measured, predicted = float(latency.measured[index]), float(latency.predicted[index])
        said = f"request {latency.request[index] + 1}: measured {measured:.4g} s, predicted {predicted:.4g} s"
        drawing.circle(*plot.at(measured, predicted), _MARK, hint=said, fill=MEASURED, fill_opacity=0.6)
    _name(plot, NAMES[latency.metric], "measured, s", "predicted, s")


def _draw_queueing(
    drawing: Drawing, arrival_s: FloatArray, measured: FloatArray, predicted: FloatArray, left: float, top: float
) -> None:
    wait = Axis(0.0, _short(max(measured.max(), predicted.max())))
    plot = Plot(drawing, Axis(0.0, _short(arrival_s.max())), wait, left, top, left + PANEL, top + PANEL)
    plot.mark_x("{:g}".format)
    plot.mark_y("{:g}".format)
    sides = (("measured", measured, MEASURED), ("predicted", predicted, PREDICTED))
    for name, waits, colour in sides:
        for arrived, waited in zip(arrival_s.tolist(), waits.tolist(), strict=True):
            said = f"arrived at {arrived:.4g} s: {name} {waited:.4g} s"
            drawing.circle(*plot.at(arrived, waited), _MARK, hint=said, fill=colour, fill_opacity=0.6)
    drawing.legend(left + 8, top + 14, [(name, colour) for name, _, colour in sides], step=(0, 16))
    _name(plot, QUEUEING, "arrival, s", "wait, s")


def _name(plot: Plot, title: str, x: str, y: str) -> None:
    middle = (plot.left + plot.right) / 2
    plot.drawing.text(middle, plot.top - 10, title, anchor="middle")
    plot.drawing.text(middle, plot.bottom + 32, x, anchor="middle")
    plot.drawing.text(plot.left - 44, (plot.top + plot.bottom) / 2, y, anchor="middle", turned=True)


def _short(most: float) -> float:
    """The end of an axis from 0 over values up to ``most``."""
    if most <= 0.0:
        return 1.0
    ten = 10.0 ** math.floor(math.log10(most))
    return next((ten * share for share in _SHORT if ten * share >= most), 10.0 * ten)
