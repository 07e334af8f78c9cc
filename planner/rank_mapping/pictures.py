"""Pictures of a rank mapping: nodes by stage and pipeline, the links between them, and the critical path.

Pure functions from arrays to text: one HTML page with plain SVG (no script, font or address), and a picture for a
terminal. Links are shaded on a logarithmic scale, because one slow link among fast ones is what one looks for; the
critical path is also named in a sentence, so that nothing depends on distinguishing colours.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.drawing import FRAME, SHADES, Axis, Drawing, heat_map, html_list, html_page, shade
from meshplan.catalogs.units import format_bandwidth
from meshplan.planner.core.arrays import FloatArray, IntArray

# Larger clusters are drawn without their last nodes, and the picture says so.
MOST_DRAWN, MOST_CELLS, MOST_TERMINAL = 24, 128, 16
_COLUMN, _ROW, _RADIUS = 130, 70, 18
_INK = "#222"
# The shade of the slowest link: white would not be seen.
_FAINTEST = 0.35

Link = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MappingView:
    """A mapping to draw.

    Args:
        title: the page's.
        names: those of all nodes.
        bytes_per_s: [n, n] directed, row = sender.
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

    @property
    def axis(self) -> Axis:
        """From the slowest link between nodes to the fastest, logarithmic."""
        between = self.bytes_per_s[np.isfinite(self.bytes_per_s) & ~np.eye(len(self.names), dtype=bool)]
        return Axis.log_over(between.tolist())


def mapping_page(view: MappingView) -> str:
    """Topology graph, heat map and the critical path as one HTML page."""
    return html_page(
        view.title,
        "<h2>Who talks to whom</h2>"
        "<p>Columns are pipeline stages; lines between columns carry activations and gradients of micro-batches, "
        f"arcs within a column the ring of a stage. Red: the links that decide.</p>\n{graph_svg(view)}"
        f"{_left_out(_num_not_in_graph(view))}"
        "<h2>Links</h2><p>Rows send, columns receive; nodes in the order of the ranks. Dark is fast.</p>\n"
        f"{links_svg(view)}{_left_out(len(view.order) - MOST_CELLS)}{html_list([*_critical_links(view), *view.notes])}",
    )


def mapping_text(view: MappingView, *, width: int = 80) -> str:
    """The same for a terminal: stages as columns, the matrix of links as shades, the critical path as a sentence."""
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
    notes = [line for text in (*_critical_links(view), *view.notes) for line in textwrap.wrap(text, width)]
    lines += ["", *_terminal_matrix(view, width), "", *notes]
    return "\n".join(lines) + "\n"


def _marked(view: MappingView, node: int, on_path: set[int]) -> str:
    return f"{view.names[node]}{'*' if node in on_path else ''}"


def _critical_links(view: MappingView) -> list[str]:
    lines = [
        f"{what}: {view.names[a]} → {view.names[b]} decides ({_rate(float(view.bytes_per_s[a, b]))})"
        for (a, b), what in view.critical
    ]
    if len(view.path) > 1:
        lines.append("slowest pipeline (*): " + " → ".join(view.names[node] for node in view.path))
    return lines


def _rate(bytes_per_s: float) -> str:
    return format_bandwidth(bytes_per_s) if math.isfinite(bytes_per_s) else "inside a node"


def _terminal_matrix(view: MappingView, width: int) -> list[str]:
    order = view.order[: max(2, min(len(view.order), 2 * MOST_TERMINAL, (width - 12) // 2))]
    axis = view.axis
    low, high = format_bandwidth(axis.low), format_bandwidth(axis.high)
    shades = SHADES[1:]
    lines = [f"links, rows send: '{shades[0]}' {low} … '{shades[-1]}' {high}"]
    for sender in order:
        shares = ((other, axis(float(view.bytes_per_s[sender, other]))) for other in order)
        cells = ("·" if sender == other else shades[round(share * (len(shades) - 1))] for other, share in shares)
        lines.append(f"{view.names[sender]:<10.10} {' '.join(cells)}")
    if len(order) < len(view.order):
        lines.append(f"… {len(view.order) - len(order)} more nodes: see the page")
    return lines


# --- pictures ------------------------------------------------------------------------------------------------------


def _drawn(view: MappingView) -> IntArray:
    return view.grid[:MOST_DRAWN, :MOST_DRAWN]


def _num_not_in_graph(view: MappingView) -> int:
    return int(view.grid.size - _drawn(view).size)


def graph_svg(view: MappingView) -> str:
    """Nodes in columns per stage, with the links that carry traffic."""
    grid = _drawn(view)
    places = {int(node): (70.0 + at[0] * _COLUMN, 60.0 + at[1] * _ROW) for at, node in np.ndenumerate(grid)}
    drawing = Drawing(70 + grid.shape[0] * _COLUMN, 60 + grid.shape[1] * _ROW, font_size=11)
    for stage in range(grid.shape[0]):
        drawing.text(70 + stage * _COLUMN, 24, f"stage {stage}", anchor="middle")
    critical = {frozenset(link) for link in [*(link for link, _ in view.critical), *itertools.pairwise(view.path)]}
    axis = view.axis
    for link in _links(view, grid):
        if link[0] != link[1] and places.keys() >= set(link):
            rate = float(view.bytes_per_s[link])
            decides = frozenset(link) in critical
            drawing.path(
                _arc(*places[link[0]], *places[link[1]]),
                hint=f"{view.names[link[0]]} → {view.names[link[1]]}: {_rate(rate)}",
                fill="none",
                stroke=FRAME if decides else shade(max(_FAINTEST, axis(rate))),
                stroke_width=4 if decides else 2,
            )
    for node, (x, y) in places.items():
        edge = FRAME if node in view.path else _INK
        drawing.circle(x, y, _RADIUS, hint=view.names[node], fill="#fff", stroke=edge, stroke_width=2)
        drawing.label(x, y, view.names[node][-8:])
    return str(drawing)


def _links(view: MappingView, grid: IntArray) -> list[Link]:
    """Pipelines along the stages, rings within them, and the critical links wherever they are."""
    along = [(int(a), int(b)) for first, second in itertools.pairwise(grid) for a, b in zip(first, second, strict=True)]
    rings = [(int(row[i]), int(row[(i + 1) % len(row)])) for row in grid for i in range(len(row))]
    return list(dict.fromkeys([*along, *rings, *(link for link, _ in view.critical)]))


def _arc(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line between columns; within a column an arc, which does not cross the nodes between."""
    bend = -_COLUMN * 0.35 if x1 == x2 and y1 != y2 else 0.0
    return f"M{x1:g} {y1:g} Q{(x1 + x2) / 2 + bend:g} {(y1 + y2) / 2:g} {x2:g} {y2:g}"


def links_svg(view: MappingView) -> str:
    """The links between nodes as shades, in the order of the ranks."""
    order = view.order[:MOST_CELLS]
    rates = [[None if a == b else float(view.bytes_per_s[a, b]) for b in order] for a in order]
    place = {node: index for index, node in enumerate(order)}
    framed = [(place[a], place[b]) for (a, b), _ in view.critical if {a, b} <= place.keys()]
    names = [view.names[node] for node in order]
    return str(heat_map(names, rates, view.axis, _rate, framed=framed))


def _left_out(count: int) -> str:
    return f"<p>{count} more nodes are not drawn.</p>\n" if count > 0 else ""
