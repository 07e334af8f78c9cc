"""Pictures as text: shapes, plots and heat maps in SVG, and HTML pages around them.

Both the profiler, which imports nothing but the catalogs, and the planner draw; so this stands with the catalogs. What
is written holds no script, font or address, so that it can be mailed and opened anywhere. All lengths are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from meshplan.catalogs.untrusted.quoting import html_text as escape

# Categorical colours that differ for most readers: blue, orange, red, cyan, green, pink, purple, light blue, brown,
# gray. Observable Plot's scheme observable10, https://observablehq.com/plot/features/scales.
PALETTE = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
GRID, MUTED, UNKNOWN, FRAME = "#e5e5e5", "#888", "#eee", "#c01c28"
# Shades of a terminal, from low to high.
SHADES = " ░▒▓█"
# Larger heat maps get no numbers in their cells, which would not be legible.
MOST_NUMBERED = 32
_CELL, _SMALL_CELL, _CELL_NAMES = 56, 12, 110
_LIGHT, _DARK = (255, 255, 255), (8, 48, 107)
_HEADING_SIZE = 15
_ROUNDING = 1e-9  # by which a mark may lie beyond the end of its axis
_STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}.n{text-align:right}"
)

Attribute = str | float
Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values between ``low`` and ``high`` → 0 … 1; values outside count as the nearer end, an empty range as 1."""

    low: float
    high: float
    log: bool = False
    marks: tuple[float, ...] = (1.0,)  # of each decade of a logarithmic axis

    @classmethod
    def log_over(cls, values: Collection[float]) -> Axis:
        """The logarithmic axis from the smallest to the largest of positive values."""
        return cls(min(values, default=1.0), max(values, default=1.0), log=True)

    @classmethod
    def decades(cls, values: Collection[float]) -> Axis:
        """The logarithmic axis over the whole decades around positive values, at least one."""
        low = math.floor(math.log10(min(values, default=1.0)))
        return cls(10.0**low, 10.0 ** max(low + 1, math.ceil(math.log10(max(values, default=1.0)))), log=True)

    @classmethod
    def marked(cls, values: Collection[float]) -> Axis:
        """The logarithmic axis around positive values from mark to mark, these being 1, 2 and 5 times powers of ten.

        Of more than two decades only the powers of ten are marked.
        """
        whole, marks = cls.decades(values), (1.0, 2.0, 5.0)
        places = cls(whole.low, whole.high, log=True, marks=marks).ticks()
        low = max(place for place in places[:-1] if place <= max(min(values, default=1.0), whole.low))
        high = min(place for place in places if place > low and place >= min(max(values, default=1.0), whole.high))
        return cls(low, high, log=True, marks=marks if high < 100.0 * low else (1.0,))

    def __call__(self, value: float) -> float:
        """Where a value is, 0 … 1."""
        if self.high <= self.low:
            return 1.0
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self, steps: int = 5) -> list[float]:
        """Values to mark: the marks of every decade, or ``steps`` equal steps."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)) - 1, math.ceil(math.log10(self.high)) + 1)
            ends = self.low * (1.0 - _ROUNDING), self.high * (1.0 + _ROUNDING)
            places = [10.0**decade * mark for decade in decades for mark in self.marks]
            return [place for place in places if ends[0] <= place <= ends[1]]
        return [self.low + (self.high - self.low) * step / steps for step in range(steps + 1)]


class Drawing:
    """An SVG picture that grows shape by shape; attributes are SVG's, with ``_`` for ``-``; ``hint`` is a tooltip.

    ``title`` and ``description`` are what a screen reader says of it.
    """

    def __init__(
        self, width: float, height: float, *, title: str = "", description: str = "", font_size: float = 12
    ) -> None:
        self.width, self.height = width, height
        self._font_size = font_size
        self._shapes: list[str] = []
        if title:
            self._shapes.append(f"<title>{escape(title)}</title>")
        if description:
            self._shapes.append(f"<desc>{escape(description)}</desc>")
        self.rect(0, 0, width, height, fill="white")

    def __str__(self) -> str:
        size = f'width="{_shown(self.width)}" height="{_shown(self.height)}"'
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_shown(self.width)} {_shown(self.height)}" '
            f'font-family="sans-serif" font-size="{_shown(self._font_size)}" role="img">'
        )
        return "\n".join([opening, *self._shapes, "</svg>"]) + "\n"

    def _add(self, tag: str, content: str, hint: str, attributes: dict[str, Attribute]) -> None:
        pairs = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{_shown(value)}"' for name, value in attributes.items()
        )
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self._shapes.append(f"<{tag}{pairs}>{title}{content}</{tag}>")

    def rect(self, x: float, y: float, width: float, height: float, *, hint: str = "", **attributes: Attribute) -> None:
        """A rectangle from its upper left corner."""
        self._add("rect", "", hint, {"x": x, "y": y, "width": width, "height": height, **attributes})

    def circle(self, x: float, y: float, radius: float, *, hint: str = "", **attributes: Attribute) -> None:
        """A circle around (x, y)."""
        self._add("circle", "", hint, {"cx": x, "cy": y, "r": radius, **attributes})

    def line(self, start: Place, end: Place, *, hint: str = "", **attributes: Attribute) -> None:
        """A straight line."""
        ends: dict[str, Attribute] = {"x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1]}
        self._add("line", "", hint, ends | attributes)

    def curve(self, points: Iterable[Place], **attributes: Attribute) -> None:
        """Points joined by straight lines."""
        joined = " ".join(f"{_shown(x)},{_shown(y)}" for x, y in points)
        self._add("polyline", "", "", {"points": joined, "fill": "none", **attributes})

    def path(self, path: str, *, hint: str = "", **attributes: Attribute) -> None:
        """A shape in SVG's path language."""
        self._add("path", "", hint, {"d": path, **attributes})

    def text(
        self, x: float, y: float, content: str, *, anchor: str = "start", turned: bool = False, **attributes: Attribute
    ) -> None:
        """A line of text that starts, ends or has its middle (``anchor``) at (x, y); ``turned``: reads upwards."""
        at: dict[str, Attribute] = {"x": x, "y": y, "text_anchor": anchor}
        if turned:
            at["transform"] = f"rotate(-90 {_shown(x)} {_shown(y)})"
        self._add("text", escape(content), "", at | attributes)

    def heading(self, x: float, content: str) -> None:
        """The title above everything else."""
        self.text(x, 24, content, font_size=_HEADING_SIZE)

    def label(self, x: float, y: float, content: str, *, fill: str = "black") -> None:
        """Text in the middle of a shape, whose tooltip shows through it."""
        self.text(x, y + self._font_size / 3, content, anchor="middle", pointer_events="none", fill=fill)

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]], *, step: Place) -> None:
        """(Name, colour) of each series, each ``step`` from the one before."""
        for index, (name, colour) in enumerate(entries):
            left, middle = x + step[0] * index, y + step[1] * index
            self.rect(left, middle - 5, 10, 10, fill=colour, class_="legend")
            self.text(left + 15, middle + 4, name)


@dataclass(frozen=True, slots=True)
class Plot:
    """The part of a drawing from (left, top) to (right, bottom) whose sides are two axes."""

    drawing: Drawing
    x: Axis
    y: Axis
    left: float
    top: float
    right: float
    bottom: float

    def at(self, x: float, y: float) -> Place:
        """Where a point of the plot is in the drawing."""
        return self.left + (self.right - self.left) * self.x(x), self.bottom - (self.bottom - self.top) * self.y(y)

    def mark_x(self, show: Callable[[float], str]) -> None:
        """Grid lines of the horizontal axis, with their values below."""
        for value in self.x.ticks():
            x, _ = self.at(value, self.y.low)
            self.drawing.line((x, self.top), (x, self.bottom), stroke=GRID)
            self.drawing.text(x, self.bottom + 16, show(value), anchor="middle")

    def mark_y(self, show: Callable[[float], str], *, on_right: bool = False) -> None:
        """Grid lines of the vertical axis, with their values to the left; on the right: values alone."""
        for value in self.y.ticks():
            _, y = self.at(self.x.low, value)
            if on_right:
                self.drawing.text(self.right + 6, y + 4, show(value))
                continue
            self.drawing.line((self.left, y), (self.right, y), stroke=GRID)
            self.drawing.text(self.left - 6, y + 4, show(value), anchor="end")

    def name_axes(self, x: str, y: str = "") -> None:
        """Names below and to the left of the plot."""
        self.drawing.text((self.left + self.right) / 2, self.drawing.height - 12, x, anchor="middle")
        if y:
            self.drawing.text(16, (self.top + self.bottom) / 2, y, anchor="middle", turned=True)


def heat_map(
    names: Sequence[str],
    values: Sequence[Sequence[float | None]],
    axis: Axis,
    show: Callable[[float], str],
    *,
    framed: Collection[tuple[int, int]] = (),
) -> Drawing:
    """A square matrix, darker for more; its numbers are written too, so that nothing depends on the shades.

    Args:
        names: those of the rows and columns.
        values: [row][column]; None is unknown.
        axis: values → shades.
        show: a value with its unit; in the cells without ``B/s``.
        framed: (row, column) of cells to point out.
    """
    cell = _CELL if len(names) <= MOST_NUMBERED else _SMALL_CELL
    size = _CELL_NAMES + len(names) * cell
    drawing = Drawing(size, size, font_size=11)
    for row, (name, line) in enumerate(zip(names, values, strict=True)):
        y = _CELL_NAMES + row * cell
        drawing.text(_CELL_NAMES - 6, y + cell / 2 + 4, name, anchor="end")
        drawing.text(y + cell / 2 + 4, _CELL_NAMES - 6, name, turned=True)
        for column, value in enumerate(line):
            x = _CELL_NAMES + column * cell
            if value is None:
                drawing.rect(x, y, cell, cell, fill=UNKNOWN)
                continue
            share, shown = axis(value), show(value)
            hint = f"{name} → {names[column]}: {shown}"
            stroke, stroke_width = (FRAME, 3) if (row, column) in framed else ("#ccc", 1)
            drawing.rect(x, y, cell, cell, hint=hint, fill=shade(share), stroke=stroke, stroke_width=stroke_width)
            if cell == _CELL and math.isfinite(value):
                ink = "#fff" if share > 1 / 2 else "#000"
                drawing.label(x + cell / 2, y + cell / 2, shown.replace("B/s", ""), fill=ink)
    return drawing


def shade(share: float) -> str:
    """The colour of 0 (white) … 1 (dark blue)."""
    return f"rgb({','.join(str(round(a + (b - a) * share)) for a, b in zip(_LIGHT, _DARK, strict=True))})"


def html_page(title: str, body: str) -> str:
    """A page with a heading.

    Args:
        title: any text.
        body: HTML, already escaped.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def html_list(lines: Iterable[str]) -> str:
    """Lines of any text as bullet points."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>\n"


def _shown(value: Attribute) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")
