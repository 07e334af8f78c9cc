"""The picture of a schedule: well-formed, complete, and true to the simulation."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from meshplan.planner.training.pipeline.lookup import pipeline_order
from meshplan.planner.training.pipeline.simulation import ChunkTimes, Simulated, simulate
from meshplan.planner.training.timeline import timeline_svg, timeline_text

SVG = "{http://www.w3.org/2000/svg}"


def run(schedule: str, p: int, v: int, m: int) -> Simulated:
    order = pipeline_order(schedule, p, v, m)
    alike = [1.0] * len(order.stage_of_chunk)
    return simulate(order, ChunkTimes(forward_s=alike, input_gradient_s=alike, weight_gradient_s=alike))


@pytest.mark.parametrize(
    ("schedule", "v", "passes"),
    [("1f1b", 1, 2), ("interleaved", 2, 2), ("zb-v", 2, 3), ("v-half", 2, 3), ("v-min", 2, 3), ("hanayo", 4, 2)],
)
def test_every_operation_is_drawn_inside_the_picture(schedule: str, v: int, passes: int) -> None:
    picture = ElementTree.fromstring(timeline_svg(run(schedule, 4, v, 8), title="a < b"))
    boxes = [box for box in picture.iter(f"{SVG}rect") if "micro-batch" in (box.findtext(f"{SVG}title") or "")]
    assert len(boxes) == 4 * v * 8 * passes
    width = float(picture.attrib["width"])
    assert all(float(box.attrib["x"]) + float(box.attrib["width"]) <= width for box in boxes)
    assert picture.findtext(f"{SVG}text") == "a < b"


def test_whole_backwards_are_drawn_as_one() -> None:
    order = pipeline_order("dualpipe-v", 4, 2, 8)
    picture = ElementTree.fromstring(timeline_svg(run("dualpipe-v", 4, 2, 8), title="DualPipeV"))
    boxes = [box for box in picture.iter(f"{SVG}rect") if "micro-batch" in (box.findtext(f"{SVG}title") or "")]
    assert len(boxes) == sum(map(len, order.stages)) == 4 * 2 * 8 * 3 - len(order.whole)


def test_the_terminal_shows_who_waits() -> None:
    # Two stages, two micro-batches, F = 1 and B + W = 2: nine units of time in eighteen columns.
    text = timeline_text(run("1f1b", 2, 1, 2), width=len("stage 0 ") + 18 + len(" idle 100%"))
    assert text == "stage 0 FFFF····BBBB··BBBB idle  33%\nstage 1 ··FFBBBBFFBBBB···· idle  33%\n"


def test_one_stage_never_waits() -> None:
    assert "·" not in timeline_text(run("none", 1, 1, 4), width=60)
