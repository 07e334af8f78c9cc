"""Pictures of a rank mapping: nodes by stage and pipeline, the links between them, and the critical path.

Pure functions from arrays to text: one HTML page with plain SVG (no script, font or address), and a picture for a
terminal. Links are shaded on a logarithmic scale, so that one slow link among fast ones stands out; the critical path
is also given as text, so that nothing depends on colours.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from meshplan.catalogs.units import format_bandwidth
from meshplan.planner.core.arrays import FloatArray, IntArray

SHADES = " ░▒▓█"
# Beyond these a picture shows links as shades without figures, or the first nodes only, with a note.
MOST_NUMBERED, MOST_CELLS, MOST_TERMINAL = 24, 128, 16
_CELL, _SMALL_CELL, _LABEL = 54, 6, 110
_COLUMN, _ROW, _RADIUS = 130, 70, 18
_LIGHT, _DARK, _CRITICAL, _INK = (230, 236, 245), (8, 48, 107), "#c01c28", "#222"
_HALF = 0.5

Link = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MappingView:
    """A mapping to draw.

    Args:
        title: title of the page.
        names: names of all nodes.
        bytes_per_s: [n, n] directed bandwidths, row = sender.
        grid: [stages, columns] node of each stage's slots.
        critical: links that limit the step, with what they carry.
        path: nodes of the slowest pipeline in order; empty without a pipeline.
        notes: lines below the pictures.
    """

    title: str
    names: Sequence[str]
    bytes_per_s: FloatArray
    grid: IntArray
    critical: Sequence[tuple[Link, str]]
    path: Sequence[int]
    notes: Sequence[str]

    @property
    def order(self) -> list[int]:
        """Nodes in use, stage by stage, then the others."""
        used = list(dict.fromkeys(int(node) for node in self.grid.ravel()))
        return [*used, *(node for node in range(len(self.names)) if node not in set(used))]


def mapping_page(view: MappingView) -> str:
    """Topology graph, heat map and the critical path as one HTML page."""
    lines = [*_critical_lines(view), *view.notes]
    notes = "".join(f"<li>{escape(line)}</li>" for line in lines)
    body = (
        f"<h1>{escape(view.title)}</h1><h2>Who talks to whom</h2>"
        "<p>Columns are pipeline stages; lines between columns carry activations and gradients of micro-batches, "
        f"arcs within a column the ring of a stage. Red: the links that decide.</p>{_graph(view)}"
        "<h2>Links</h2><p>Rows send, columns receive; nodes in the order of the ranks. Dark is fast.</p>"
        f"{_heat_map(view)}"
        f"<ul>{notes}</ul>"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(view.title)}</title></head>'
        f'<body style="font-family:sans-serif">{body}</body></html>\n'
    )


def mapping_text(view: MappingView, *, width: int = 80) -> str:
    """For a terminal: stages as columns, the matrix of links as shades, the critical path as text."""
    size = max(max((len(name) for name in view.names), default=4), 7)
    columns = max(1, min(view.grid.shape[0], (width - 4) // (size + 3)))
    heading = "   ".join(f"{f'stage {stage}':<{size}}" for stage in range(columns))
    lines = [view.title, "", heading.rstrip()]
    on_path = set(view.path)
    for row in view.grid.T[:MOST_TERMINAL]:
        cells = [f"{_marked(view, int(node), on_path):<{size}}" for node in row[:columns]]
        lines.append(" → ".join(cells).rstrip())
    hidden = max(0, view.grid.shape[1] - MOST_TERMINAL)
    if hidden or columns < view.grid.shape[0]:
        lines.append(f"… {hidden} more rows, {view.grid.shape[0] - columns} more stages: see the page")
    words = [line for text in (*_critical_lines(view), *view.notes) for line in textwrap.wrap(text, width)]
    lines += ["", *_terminal_matrix(view, width), "", *words]
    return "\n".join(lines) + "\n"


def _marked(view: MappingView, node: int, on_path: set[int]) -> str:
    return f"{view.names[node]}{'*' if node in on_path else ''}"


def _critical_lines(view: MappingView) -> list[str]:
    words = [
        f"{what}: {view.names[a]} → {view.names[b]} decides ({_rate(view, (a, b))})" for (a, b), what in view.critical
    ]
    if len(view.path) > 1:
        words.append("slowest pipeline (*): " + " → ".join(view.names[node] for node in view.path))
    return words


def _rate(view: MappingView, link: Link) -> str:
    rate = float(view.bytes_per_s[link])
    return format_bandwidth(rate) if math.isfinite(rate) else "inside a node"


def _terminal_matrix(view: MappingView, width: int) -> list[str]:
    order = view.order[: max(2, min(len(view.order), 2 * MOST_TERMINAL, (width - 12) // 2))]
    slowest, fastest = _range(view)
    lines = [
        f"links, rows send: '{SHADES[1]}' {format_bandwidth(slowest)} … '{SHADES[-1]}' {format_bandwidth(fastest)}"
    ]
    for sender in order:
        cells = (" ·" if sender == other else " " + _shade(view, sender, other) for other in order)
        lines.append(f"{view.names[sender]:<10.10}{''.join(cells)}")
    if len(order) < len(view.order):
        lines.append(f"… {len(view.order) - len(order)} more nodes: see the page")
    return lines


def _shade(view: MappingView, sender: int, receiver: int) -> str:
    return SHADES[1 + round(_position(view, sender, receiver) * (len(SHADES) - 2))]


def _range(view: MappingView) -> tuple[float, float]:
    rates = view.bytes_per_s[np.isfinite(view.bytes_per_s) & ~np.eye(len(view.names), dtype=bool)]
    return (float(rates.min()), float(rates.max())) if rates.size else (1.0, 1.0)


def _position(view: MappingView, sender: int, receiver: int) -> float:
    """0 for the slowest link … 1 for the fastest, logarithmic."""
    slowest, fastest = _range(view)
    rate = float(view.bytes_per_s[sender, receiver])
    if fastest <= slowest or not math.isfinite(rate):
        return 1.0
    return math.log(rate / slowest) / math.log(fastest / slowest)


def _colour(position: float) -> str:
    shade = ",".join(str(round(a + (b - a) * position)) for a, b in zip(_LIGHT, _DARK, strict=True))
    return f"rgb({shade})"


# --- pictures ------------------------------------------------------------------------------------------------------


def _graph(view: MappingView) -> str:
    stages, columns = view.grid.shape
    shown = min(columns, MOST_NUMBERED)
    stages_shown = min(stages, MOST_NUMBERED)
    place = {
        int(view.grid[stage, row]): (70 + stage * _COLUMN, 60 + row * _ROW)
        for stage in range(stages_shown)
        for row in range(shown)
    }
    marked = {frozenset(link) for link, _ in view.critical} | {
        frozenset(pair) for pair in itertools.pairwise(view.path)
    }
    shapes = [
        f'<text x="{70 + stage * _COLUMN}" y="24" text-anchor="middle">stage {stage}</text>'
        for stage in range(stages_shown)
    ]
    for sender, receiver in _lines(view, stages_shown, shown):
        if sender in place and receiver in place and sender != receiver:
            shapes.append(_line(view, place, sender, receiver, critical=frozenset((sender, receiver)) in marked))
    for node, (x, y) in place.items():
        name = escape(str(view.names[node]))
        edge = _CRITICAL if node in view.path else _INK
        shapes.append(
            f'<g><title>{name}</title><circle cx="{x}" cy="{y}" r="{_RADIUS}" fill="#fff" stroke="{edge}" '
            f'stroke-width="2"/><text x="{x}" y="{y + 4}" text-anchor="middle">{name[-8:]}</text></g>'
        )
    left_out = view.grid.size - stages_shown * shown
    note = f"<p>{left_out} more nodes are not drawn.</p>" if left_out > 0 else ""
    return _svg(70 + stages_shown * _COLUMN, 60 + shown * _ROW, shapes) + note


def _lines(view: MappingView, stages: int, shown: int) -> list[Link]:
    """Pipelines along the stages, rings within them, and the critical links wherever they are."""
    grid = view.grid[:stages, :shown]
    along = [(int(a), int(b)) for first, second in itertools.pairwise(grid) for a, b in zip(first, second, strict=True)]
    rings = [(int(row[i]), int(row[(i + 1) % len(row)])) for row in grid for i in range(len(row))]
    return list(dict.fromkeys([*along, *rings, *(link for link, _ in view.critical)]))


def _line(view: MappingView, place: dict[int, tuple[int, int]], sender: int, receiver: int, *, critical: bool) -> str:
    (x1, y1), (x2, y2) = place[sender], place[receiver]
    colour = _CRITICAL if critical else _colour(max(0.25, _position(view, sender, receiver)))
    bend = -_COLUMN * 0.35 * abs(y2 - y1) / max(_ROW, abs(y2 - y1)) if x1 == x2 else 0.0
    hint = f"{view.names[sender]} → {view.names[receiver]}: {_rate(view, (sender, receiver))}"
    return (
        f'<path d="M{x1} {y1} Q{(x1 + x2) / 2 + bend:.0f} {(y1 + y2) / 2:.0f} {x2} {y2}" fill="none" '
        f'stroke="{colour}" stroke-width="{4 if critical else 2}"><title>{escape(hint)}</title></path>'
    )


def _heat_map(view: MappingView) -> str:
    order = view.order[:MOST_CELLS]
    cell = _CELL if len(order) <= MOST_NUMBERED else _SMALL_CELL
    critical = {link for link, _ in view.critical}
    shapes = []
    for row, sender in enumerate(order):
        y = _LABEL + row * cell
        if cell == _CELL:
            name = escape(str(view.names[sender]))
            x = _LABEL + row * cell + cell / 2
            shapes.append(f'<text x="{_LABEL - 6}" y="{y + cell / 2 + 4}" text-anchor="end">{name}</text>')
            shapes.append(f'<text transform="translate({x + 4},{_LABEL - 6}) rotate(-90)">{name}</text>')
        for column, receiver in enumerate(order):
            if sender != receiver:
                x = _LABEL + column * cell
                shapes.append(_heat_cell(view, (sender, receiver), x, y, cell, critical=(sender, receiver) in critical))
    size = _LABEL + len(order) * cell
    left_out = len(view.order) - len(order)
    note = f"<p>{left_out} more nodes are not drawn.</p>" if left_out else ""
    return _svg(size, size, shapes) + note


def _heat_cell(view: MappingView, link: Link, x: float, y: float, cell: float, *, critical: bool) -> str:
    position = _position(view, *link)
    rate = _rate(view, link)
    edge = f'stroke="{_CRITICAL}" stroke-width="3"' if critical else 'stroke="#ccc"'
    ink = "#fff" if position > _HALF else "#000"
    number = (
        f'<text x="{x + cell / 2}" y="{y + cell / 2 + 4}" text-anchor="middle" fill="{ink}">'
        f"{rate.replace('B/s', '')}</text>"
        if cell == _CELL and math.isfinite(float(view.bytes_per_s[link]))
        else ""
    )
    hint = escape(f"{view.names[link[0]]} → {view.names[link[1]]}: {rate}")
    return (
        f'<g><title>{hint}</title><rect x="{x}" y="{y}" width="{cell}" height="{cell}" '
        f'fill="{_colour(position)}" {edge}/>{number}</g>'
    )


def _svg(width: float, height: float, shapes: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" role="img">{"".join(shapes)}</svg>'
    )
