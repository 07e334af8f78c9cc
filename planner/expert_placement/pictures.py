"""Pictures of a placement: load of each device before and after, and the traffic between devices.

Pure functions from arrays to text: a self-contained SVG, and bars for a terminal. A bar is the mean over layers of a
device's time in units of the ideal time (1 = perfect balance), its whisker reaches to the device's busiest layer. Many
devices are drawn by groups of neighbours, so that both pictures stay readable; a group shows its busiest member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.expert_placement.problem.objectives import device_time, device_traffic

MOST_BARS = 64
MOST_CELLS = 64  # rows of the traffic matrix
MOST_LINES = 32  # of the terminal picture

_WIDTH, _MARGIN, _TITLE = 760.0, 48.0, 28.0
_BARS_HEIGHT, _MATRIX = 220.0, 300.0
_BEFORE, _AFTER, _IDEAL, _INK = "#b0b7c3", "#2f6fb0", "#c0392b", "#222222"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementView:
    """What is drawn of one placement.

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
    matrices = [item for item in views if item.traffic is not None]
    height = _TITLE + _BARS_HEIGHT + _MARGIN + (_MATRIX + _MARGIN if matrices else 0.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" width="{_WIDTH:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="11" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH:g}" height="{height:g}" fill="white"/>',
        f'<text x="{_MARGIN:g}" y="18" font-size="14">{escape(title)}</text>',
        *_svg_bars(views),
    ]
    top = _TITLE + _BARS_HEIGHT + _MARGIN
    peak = max((float(item.traffic.max()) for item in matrices if item.traffic is not None), default=0.0)
    for index, item in enumerate(matrices):
        left = _MARGIN + index * (_MATRIX + _MARGIN)
        if item.traffic is not None:
            parts += _svg_matrix(item.name, grouped_traffic(item.traffic), peak, left, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _svg_bars(views: Sequence[PlacementView]) -> list[str]:
    """Bars of the mean over layers, whiskers to the busiest layer, a line at the ideal."""
    colours = [_AFTER] if len(views) == 1 else [_BEFORE, _AFTER]
    tops = [grouped(item.times.max(axis=0), MOST_BARS) for item in views]
    means = [grouped(item.times.mean(axis=0), MOST_BARS) for item in views]
    peak = max(1.0, *(float(top.max()) for top in tops))
    base, scale = _TITLE + _BARS_HEIGHT, (_BARS_HEIGHT - 20.0) / peak
    group = (_WIDTH - 2 * _MARGIN) / means[0].size
    bar = 0.8 * group / len(views)
    parts = []
    for which, item in enumerate(views):
        colour = colours[min(which, len(colours) - 1)]
        legend = f"{item.name}: balancedness {_balancedness(item.times):.4f}"
        x, y = _MARGIN + 260.0 * which, base + 30.0
        parts.append(f'<rect x="{x:g}" y="{y - 9:g}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14:g}" y="{y:g}">{escape(legend)}</text>')
        for device, (mean, most) in enumerate(zip(means[which], tops[which], strict=True)):
            left = _MARGIN + group * device + bar * which
            middle, tip = left + bar / 2, base - most * scale
            parts.append(
                f'<rect class="bar" x="{left:.2f}" y="{base - mean * scale:.2f}" width="{bar:.2f}" '
                f'height="{mean * scale:.2f}" fill="{colour}"/>'
                f'<line x1="{middle:.2f}" x2="{middle:.2f}" y1="{base - mean * scale:.2f}" y2="{tip:.2f}" '
                f'stroke="{_INK}" stroke-width="0.7"/>'
            )
    ideal = base - scale
    parts.append(
        f'<line x1="{_MARGIN:g}" x2="{_WIDTH - _MARGIN:g}" y1="{ideal:.2f}" y2="{ideal:.2f}" stroke="{_IDEAL}" '
        f'stroke-dasharray="4 3"/><text x="4" y="{ideal + 4:.2f}" fill="{_IDEAL}">ideal</text>'
        f'<text x="{_MARGIN:g}" y="{base + 14:.2f}">{_axis(views[0].times.shape[1], means[0].size)}</text>'
    )
    return parts


def _svg_matrix(name: str, traffic: FloatArray, peak: float, left: float, top: float) -> list[str]:
    """Cells, darker for more; the diagonal is traffic that stays."""
    size = traffic.shape[0]
    cell = _MATRIX / size
    stays = float(np.trace(traffic))
    caption = f"{name}: from (rows) to (columns), {stays:.1%} on the diagonal"
    parts = [f'<text x="{left:g}" y="{top - 8:g}">{escape(caption)}</text>']
    for row, column in np.ndindex(size, size):
        strength = 0.0 if peak <= 0 else min(1.0, float(traffic[row, column]) / peak)
        parts.append(
            f'<rect class="cell" x="{left + cell * column:.2f}" y="{top + cell * row:.2f}" width="{cell:.2f}" '
            f'height="{cell:.2f}" fill="{_AFTER}" fill-opacity="{strength:.3f}"/>'
        )
    frame = f'<rect x="{left:g}" y="{top:g}" width="{_MATRIX:g}" height="{_MATRIX:g}" fill="none" stroke="{_INK}"/>'
    return [*parts, frame]


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
