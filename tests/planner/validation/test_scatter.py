"""The scatter plot: well-formed SVG, everything inside, text escaped."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.validation.scatter import SIZE, Point, scatter_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(points: list[Point]) -> ElementTree.Element:
    return ElementTree.fromstring(scatter_svg(points, title="step time", unit="s"))


def point(measured: float, predicted: float, label: str = "run", series: str = "f") -> Point:
    return Point(measured=measured, predicted=predicted, label=label, series=series)


@given(st.lists(st.tuples(st.floats(1e-6, 1e12), st.floats(1e-6, 1e12)), min_size=1, max_size=20))
def test_every_point_lies_inside(pairs: list[tuple[float, float]]) -> None:
    circles = [
        circle for circle in drawn([point(*pair) for pair in pairs]).iter(f"{SVG}circle") if circle.get("r") == "3"
    ]
    assert len(circles) == len(pairs)
    for circle in circles:
        assert 0.0 <= float(circle.get("cx", "-1")) <= SIZE
        assert 0.0 <= float(circle.get("cy", "-1")) <= SIZE


def test_equal_values_lie_on_the_line() -> None:
    for value in (0.003, 1.0, 77.0):
        (circle,) = [c for c in drawn([point(value, value), point(1e3, 0)]).iter(f"{SVG}circle") if c.get("r") == "3"]
        assert float(circle.get("cx", "0")) + float(circle.get("cy", "0")) == SIZE


def test_text_from_users_is_escaped() -> None:
    root = drawn([point(1.0, 2.0, label="<script>&\"'", series="a<b")])
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles == ["<script>&\"'"]
    assert not list(root.iter(f"{SVG}script"))


def test_a_series_has_one_colour_and_one_legend() -> None:
    points = [point(1, 2, series=name) for name in ("a", "b", "a", *"cdefghijklm")]
    root = drawn(points)
    legends = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "legend"]
    assert len(legends) == 13
    dots = [c.get("fill") for c in root.iter(f"{SVG}circle") if c.get("r") == "3"]
    assert dots[0] == dots[2] != dots[1]


def test_no_positive_value_draws_axes_only() -> None:
    assert not [c for c in drawn([point(0.0, 0.0)]).iter(f"{SVG}circle") if c.get("r") == "3"]
    assert scatter_svg([], title="", unit="s").startswith("<svg")
