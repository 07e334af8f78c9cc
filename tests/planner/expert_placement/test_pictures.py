"""The pictures say what the arrays say: counted bars, parsed geometry, and totals from the format's definition."""

from __future__ import annotations

from xml.parsers import expat

import numpy as np
import pytest

from meshplan.planner.expert_placement.pictures import (
    MOST_BARS,
    MOST_CELLS,
    MOST_LINES,
    grouped,
    grouped_traffic,
    svg_picture,
    text_picture,
    view,
)
from meshplan.planner.expert_placement.problem.objectives import cross_device_fraction, device_traffic

LOAD = np.array([[8.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
BEFORE, AFTER = np.array([[0, 1, 2, 3], [0, 1, 2, 3]]), np.array([[0, 1, 2, 3], [0, 2, 1, 3]])
TRANSITIONS = np.arange(16, dtype=float).reshape(1, 4, 4)


def elements(svg: str) -> list[tuple[str, dict[str, str]]]:
    """(tag, attributes) of a well-formed document."""
    found: list[tuple[str, dict[str, str]]] = []
    parser = expat.ParserCreate()
    parser.StartElementHandler = lambda tag, attributes: found.append((tag, attributes))
    parser.Parse(svg, True)
    return found


def of_class(svg: str, name: str) -> list[dict[str, str]]:
    return [attributes for _, attributes in elements(svg) if attributes.get("class") == name]


def test_bars_stand_in_proportion_to_the_load() -> None:
    """Device 0 holds 9 of 12 in the first layer, 2 of 4 in the second: 1.5 and 1 times the ideal, 1.25 on average."""
    only = view("now", BEFORE, LOAD, np.ones(2))
    assert only.times.tolist() == [[1.5, 0.5], [1.0, 1.0]]
    heights = [float(bar["height"]) for bar in of_class(svg_picture("a", [only]), "bar")]
    assert heights[0] / heights[1] == pytest.approx(1.25 / 0.75, rel=1e-3)


def test_the_matrix_keeps_all_traffic_and_its_diagonal_is_what_stays() -> None:
    for placement in (BEFORE, AFTER):
        matrix = device_traffic(TRANSITIONS, placement, 2)
        assert matrix.sum() == pytest.approx(1.0)
        assert np.trace(matrix) == pytest.approx(1.0 - cross_device_fraction(TRANSITIONS, placement, 2))
    svg = svg_picture("b", [view("x", placement, LOAD, np.ones(2), TRANSITIONS) for placement in (BEFORE, AFTER)])
    assert len(of_class(svg, "cell")) == 2 * 2 * 2


def test_text_from_outside_cannot_leave_its_place() -> None:
    svg = svg_picture("<script>&", [view('"><x', BEFORE, LOAD, np.ones(2))])
    assert "<title>&lt;script&gt;&amp;</title>" in svg
    assert {tag for tag, _ in elements(svg)} <= {"svg", "title", "rect", "text", "line"}


def test_the_same_arrays_give_the_same_bytes() -> None:
    pictures = {svg_picture("c", [view("x", BEFORE, LOAD, np.ones(2), TRANSITIONS)]) for _ in range(2)}
    assert len(pictures) == 1
    assert "http" not in pictures.pop().replace("http://www.w3.org/2000/svg", "")  # nothing is fetched


def test_many_devices_are_grouped_and_none_is_lost() -> None:
    times = np.arange(330, dtype=float)
    bars = grouped(times, MOST_BARS)
    assert bars.size <= MOST_BARS
    assert bars.max() == 329.0
    assert grouped(times[:5], MOST_BARS).tolist() == times[:5].tolist()
    traffic = np.random.default_rng(0).random((130, 130))
    assert grouped_traffic(traffic).shape[0] <= MOST_CELLS
    assert grouped_traffic(traffic).sum() == pytest.approx(traffic.sum())
    placement = np.tile(np.arange(330), (2, 1))
    svg = svg_picture("d", [view("x", placement, np.ones((2, 330)), np.ones(330))])
    assert len(of_class(svg, "bar")) <= MOST_BARS


def test_the_terminal_variant_stays_within_its_width() -> None:
    views = [view("before", BEFORE, LOAD, np.ones(2)), view("after", AFTER, LOAD, np.ones(2))]
    lines = text_picture(views, width=60).splitlines()
    assert all(len(line) <= 60 for line in lines[1:-1])
    assert len(lines) == 2 + 2 * 2
    assert "1.25 … 1.50" in lines[1]
    placement = np.tile(np.arange(100), (1, 1))
    many = text_picture([view("x", placement, np.ones((1, 100)), np.ones(100))])
    assert len(many.splitlines()) <= MOST_LINES + 2


def test_layers_without_load_draw_nothing() -> None:
    empty = view("idle", BEFORE, np.zeros((2, 4)), np.ones(2), np.zeros((1, 4, 4)))
    assert not empty.times.any()
    assert "balancedness 1.0000" in svg_picture("e", [empty])
