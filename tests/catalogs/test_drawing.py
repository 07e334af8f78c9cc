"""Pictures as text: well-formed, escaped, and where the axes say."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from meshplan.catalogs.drawing import MOST_NUMBERED, Axis, Drawing, Plot, heat_map, html_list, html_page

SVG = "{http://www.w3.org/2000/svg}"


def parsed(drawing: Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(str(drawing))


def test_axes_are_linear_or_logarithmic_and_end_at_their_ends() -> None:
    assert [Axis(0, 4)(value) for value in (-1, 0, 1, 4, 9)] == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert [Axis(1, 100, log=True)(value) for value in (1, 10, 100, math.inf)] == [0.0, 0.5, 1.0, 1.0]
    assert Axis.log_over([3.0])(3.0) == 1.0
    assert Axis.decades([0.3, 12.0]) == Axis(0.1, 100.0, log=True)
    assert Axis.decades([1.0]).ticks() == [1.0, 10.0]
    assert Axis(0, 10).ticks(2) == [0.0, 5.0, 10.0]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.021, 0.04], [0.02, 0.05]),
        ([0.05, 0.05], [0.05, 0.1]),
        ([1.0], [1.0, 2.0]),
        ([3.0, 90.0], [2.0, 5.0, 10.0, 20.0, 50.0, 100.0]),
        ([3.0, 210.0], [10.0, 100.0]),
        ([0.03, 15.0], [0.1, 1.0, 10.0]),
        ([], [1.0, 2.0]),
    ],
)
def test_a_marked_axis_ends_next_to_its_values(values: list[float], ticks: list[float]) -> None:
    axis = Axis.marked(values)
    assert axis.ticks() == pytest.approx(ticks)
    assert all(axis.low <= value <= axis.high for value in values)


def test_a_picture_may_say_what_it_shows() -> None:
    root = parsed(Drawing(10, 10, title="a", description="b < c"))
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert root.findtext(f"{SVG}desc") == "b < c"


def test_text_and_attributes_are_escaped() -> None:
    drawing = Drawing(10, 10, title="<a>&")
    drawing.text(1, 2, "<script>", fill='"><x')
    drawing.rect(0, 0, 1, 1, hint="r&d <1>", fill_opacity=0.5)
    root = parsed(drawing)
    assert [title.text for title in root.iter(f"{SVG}title")] == ["<a>&", "r&d <1>"]
    (text,) = root.iter(f"{SVG}text")
    assert (text.text, text.get("fill")) == ("<script>", '"><x')
    assert [box.get("fill-opacity") for box in root.iter(f"{SVG}rect")] == [None, "0.5"]
    assert html_list(["<b>"]) == "<ul><li>&lt;b&gt;</li></ul>\n"
    assert "<h1>a &lt; b</h1>" in html_page("a < b", "")


def test_a_plot_puts_the_origin_below_left() -> None:
    plot = Plot(Drawing(100, 100), Axis(0, 1), Axis(0, 1), 10, 20, 90, 80)
    assert plot.at(0, 0) == (10, 80)
    assert plot.at(1, 1) == (90, 20)


@pytest.mark.parametrize("count", [2, MOST_NUMBERED + 1])
def test_a_heat_map_has_all_cells_and_numbers_where_there_is_room(count: int) -> None:
    names = [f"n{index}" for index in range(count)]
    values = [[None if a == b else 1e9 * (1 + a) for b in range(count)] for a in range(count)]
    root = parsed(heat_map(names, values, Axis(1e9, 1e11, log=True), lambda value: f"{value:.0f} B/s", framed=[(0, 1)]))
    cells = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(cells) == count * (count - 1)
    assert [cell.findtext(f"{SVG}title") for cell in cells if cell.get("stroke-width") == "3"] == [
        "n0 → n1: 1000000000 B/s"
    ]
    assert len(list(root.iter(f"{SVG}text"))) == 2 * count + (count * (count - 1) if count <= MOST_NUMBERED else 0)
