"""Pictures of a placement: load of each device before and after, and the traffic between devices.

Pure functions from arrays to text: a self-contained SVG, and bars for a terminal. A bar is the mean over layers of a
device's time in units of the ideal time (1 = perfect balance), its whisker reaches to the device's busiest layer. Many
devices are drawn by groups of neighbours, so that both pictures stay readable; a group shows its busiest member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.drawing import Axis, Drawing, Plot
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.expert_placement.problem.objectives import device_time, device_traffic

MOST_BARS = 64
MOST_CELLS = 64  # rows of the traffic matrix
MOST_LINES = 32  # in the terminal

_WIDTH, _MARGIN, _TITLE = 760.0, 48.0, 28.0
_BARS_HEIGHT, _MATRIX = 220.0, 300.0
_BEFORE, _AFTER, _IDEAL, _INK = "#b0b7c3", "#2f6fb0", "#c0392b", "#222222"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementView:
    """One placement as it is drawn.

    Args:
        name: in the legend.
        times: [L, G] time of each device over the ideal time of the layer.
        traffic: [G, G] share of the layer-to-layer transitions from device to device, or None.
    """

    name: str
    times: FloatArray
    traffic: FloatArray | None = None


def view(
    name: str, placement: IntArray, load: FloatArray, device_speed: FloatArray, transitions: FloatArray | None = None
) -> PlacementView:
    """What a [L, S] map does to a [L, E] load; layers without load take no time."""
    ideal = load.sum(axis=1, keepdims=True) / device_speed.sum()
    times = device_time(load, placement, device_speed)
    times = np.divide(times, ideal, out=np.zeros_like(times), where=ideal > 0)
    traffic = None if transitions is None else device_traffic(transitions, placement, device_speed.size)
    return PlacementView(name=name, times=times, traffic=traffic)


def svg_picture(title: str, views: Sequence[PlacementView]) -> str:
    """A self-contained SVG: bars of all views side by side, a traffic matrix below for each that has one.

    Args:
        title: heading, any text.
        views: one, or before and after.
    """
    matrices = [(item.name, grouped_traffic(item.traffic)) for item in views if item.traffic is not None]
    top = _TITLE + _BARS_HEIGHT + _MARGIN
    drawing = Drawing(_WIDTH, top + (_MATRIX + _MARGIN if matrices else 0.0), title=title, font_size=11)
    drawing.heading(_MARGIN, title)
    _draw_bars(drawing, views)
    peak = max((float(traffic.max()) for _, traffic in matrices), default=0.0)
    for index, (name, traffic) in enumerate(matrices):
        _draw_matrix(drawing, name, traffic, peak, _MARGIN + index * (_MATRIX + _MARGIN), top)
    return str(drawing)


def _draw_bars(drawing: Drawing, views: Sequence[PlacementView]) -> None:
    """Bars for the mean over layers, whiskers to the busiest layer, a line at the ideal."""
    colours = [_AFTER] if len(views) == 1 else [_BEFORE, *[_AFTER] * (len(views) - 1)]
    tops = [grouped(item.times.max(axis=0), MOST_BARS) for item in views]
    means = [grouped(item.times.mean(axis=0), MOST_BARS) for item in views]
    groups, peak = means[0].size, max(1.0, *(float(top.max()) for top in tops))
    base = _TITLE + _BARS_HEIGHT
    plot = Plot(drawing, Axis(0, groups), Axis(0, peak), _MARGIN, _TITLE + 20, _WIDTH - _MARGIN, base)
    bar = 0.8 / len(views)
    for which, colour in enumerate(colours):
        for device, (mean, most) in enumerate(zip(means[which], tops[which], strict=True)):
            left, top = plot.at(device + bar * which, float(mean))
            right, tip = plot.at(device + bar * (which + 1), float(most))
            middle = (left + right) / 2
            drawing.rect(left, top, right - left, base - top, fill=colour, class_="bar")
            drawing.line((middle, top), (middle, tip), stroke=_INK, stroke_width=0.7)
    names = [f"{item.name}: balancedness {_balancedness(item.times):.4f}" for item in views]
    drawing.legend(_MARGIN, base + 26, zip(names, colours, strict=True), step=(260, 0))
    left, ideal = plot.at(0.0, 1.0)
    drawing.line((left, ideal), (plot.right, ideal), stroke=_IDEAL, stroke_dasharray="4 3")
    drawing.text(4, ideal + 4, "ideal", fill=_IDEAL)
    drawing.text(_MARGIN, base + 14, _axis(views[0].times.shape[1], groups))


def _draw_matrix(drawing: Drawing, name: str, traffic: FloatArray, peak: float, left: float, top: float) -> None:
    """Cells, darker for more; the diagonal is traffic that stays on a device."""
    cell = _MATRIX / traffic.shape[0]
    caption = f"{name}: from (rows) to (columns), {float(np.trace(traffic)):.1%} on the diagonal"
    drawing.text(left, top - 8, caption)
    for (row, column), value in np.ndenumerate(traffic):
        share = "0" if peak <= 0 else f"{float(value) / peak:.3f}"
        at = left + cell * column, top + cell * row
        drawing.rect(*at, cell, cell, fill=_AFTER, fill_opacity=share, class_="cell")
    drawing.rect(left, top, _MATRIX, _MATRIX, fill="none", stroke=_INK)


def text_picture(views: Sequence[PlacementView], *, width: int = 80) -> str:
    """Bars for a terminal: a line for each device (or group) and view, the busiest layer marked ``|``.

    Args:
        views: one, or before and after.
        width: columns.
    """
    lines = []
    names = max(len(item.name) for item in views)
    tops = [grouped(item.times.max(axis=0), MOST_LINES) for item in views]
    means = [grouped(item.times.mean(axis=0), MOST_LINES) for item in views]
    peak = max(1.0, *(float(top.max()) for top in tops))
    room = max(10, width - names - 6 - 16)
    for group in range(means[0].size):
        for which, item in enumerate(views):
            mean, most = float(means[which][group]), float(tops[which][group])
            bar = "█" * round(mean / peak * room)
            tip = round(most / peak * room)
            drawn = f"{bar.ljust(tip)}|" if tip >= len(bar) else bar
            label = f"{group:>4d}" if which == 0 else "    "
            lines.append(f"{label} {item.name:<{names}} {drawn:<{room + 1}} {mean:.2f} … {most:.2f}".rstrip())
    heading = f"{_axis(views[0].times.shape[1], means[0].size)}; bar: mean over layers, |: busiest layer, 1 is ideal"
    summary = "   ".join(f"{item.name}: balancedness {_balancedness(item.times):.4f}" for item in views)
    return "\n".join([heading, *lines, summary]) + "\n"


def grouped(values: FloatArray, most: int) -> FloatArray:
    """Values of neighbouring devices, at most ``most`` groups of equal size; each shows its largest member."""
    size = -(-values.size // most)
    padded = np.full(-(-values.size // size) * size, -np.inf)
    padded[: values.size] = values
    largest: FloatArray = padded.reshape(-1, size).max(axis=1)
    return largest


def grouped_traffic(traffic: FloatArray) -> FloatArray:
    """The matrix summed over groups of neighbouring devices, at most :data:`MOST_CELLS` of them."""
    num_devices = traffic.shape[0]
    size = -(-num_devices // MOST_CELLS)
    starts = np.arange(0, num_devices, size)
    summed: FloatArray = np.add.reduceat(np.add.reduceat(traffic, starts, axis=0), starts, axis=1)
    return summed


def _balancedness(times: FloatArray) -> float:
    busiest = times.max(axis=1)
    return float(np.divide(1.0, busiest, out=np.ones_like(busiest), where=busiest > 0).mean())


def _axis(num_devices: int, num_groups: int) -> str:
    if num_groups == num_devices:
        return f"{num_devices} devices"
    return f"{num_devices} devices, drawn by {-(-num_devices // num_groups)} neighbours (the busiest of them)"
