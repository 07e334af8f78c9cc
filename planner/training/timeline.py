"""A pipeline schedule as a picture: one row a stage, time from left to right; for a browser (SVG) or a terminal."""

from __future__ import annotations

from meshplan.catalogs.drawing import PALETTE, UNKNOWN, Drawing
from meshplan.catalogs.units import format_duration
from meshplan.planner.training.pipeline.orders import BACKWARD, FORWARD, WEIGHT
from meshplan.planner.training.pipeline.simulation import Simulated, Span

COLOURS = {FORWARD: PALETTE[0], BACKWARD: PALETTE[1], WEIGHT: PALETTE[4]}
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradient"}
WIDTH, ROW, GAP, LEFT, TOP = 1200, 26, 4, 72, 56
# Pixels that a micro-batch's number needs.
LABEL_WIDTH = 15
# Pixels from which on a span has a white edge.
EDGED_WIDTH = 4
# Later chunks of a stage are lighter, down to this opacity.
LIGHTEST = 0.45


def timeline_svg(run: Simulated, *, title: str) -> str:
    """The schedule as SVG text.

    Args:
        run: the schedule in time.
        title: above the picture.
    """
    end = run.flushed_s
    height = TOP + len(run.stages) * (ROW + GAP) + 40
    drawing = Drawing(WIDTH, height, font_size=11)
    drawing.heading(LEFT, title)
    drawing.legend(LEFT, 38, [(NAMES[kind], COLOURS[kind]) for kind in _kinds(run)], step=(130, 0))
    opacity = _opacity(run)
    for stage, spans in enumerate(run.stages):
        top = TOP + stage * (ROW + GAP)
        drawing.text(LEFT - 6, top + ROW / 2 + 4, f"stage {stage}", anchor="end")
        idle = f"idle {run.idle_s[stage] / end:.1%}, at most {run.peak_in_flight[stage]:g} in flight"
        drawing.rect(LEFT, top, WIDTH - LEFT - GAP, ROW, fill=UNKNOWN, hint=f"stage {stage}: {idle}")
        for span in spans:
            _draw_span(drawing, span, top, (WIDTH - LEFT - GAP) / end, opacity[span.op.chunk])
    drawing.text(LEFT, height - 14, "0")
    drawing.text(WIDTH - GAP, height - 14, format_duration(end), anchor="end")
    return str(drawing)


def _draw_span(drawing: Drawing, span: Span, top: float, pixels_per_s: float, opacity: float) -> None:
    op, width = span.op, (span.end_s - span.start_s) * pixels_per_s
    x = LEFT + span.start_s * pixels_per_s
    duration = f"{format_duration(span.start_s)} to {format_duration(span.end_s)}"
    hint = f"{NAMES[op.kind]}, micro-batch {op.microbatch}, chunk {op.chunk}: {duration}"
    edge = {"stroke": "white"} if width >= EDGED_WIDTH else {}  # of narrow spans little else would be left
    drawing.rect(x, top, width, ROW, hint=hint, fill=COLOURS[op.kind], fill_opacity=opacity, **edge)
    if width >= LABEL_WIDTH:
        drawing.label(x + width / 2, top + ROW / 2, str(op.microbatch))


def timeline_text(run: Simulated, *, width: int) -> str:
    """The schedule for a terminal: F, B and W where a stage works, a dot where it waits.

    Args:
        run: the schedule in time.
        width: columns in all.
    """
    label = len(f"stage {len(run.stages) - 1} ")
    columns = max(width - label - len(" idle 100%"), 10)
    step = run.flushed_s / columns
    lines = []
    for stage, spans in enumerate(run.stages):
        row, at = [], 0
        for column in range(columns):
            moment = (column + 0.5) * step
            while at < len(spans) and spans[at].end_s <= moment:
                at += 1
            works = at < len(spans) and spans[at].start_s <= moment
            row.append(spans[at].op.kind if works else "·")
        idle = run.idle_s[stage] / run.flushed_s
        lines.append(f"{f'stage {stage}':<{label}}{''.join(row)} idle {idle:4.0%}")
    return "\n".join(lines) + "\n"


def _kinds(run: Simulated) -> list[str]:
    used = {span.op.kind for spans in run.stages for span in spans}
    return [kind for kind in COLOURS if kind in used]


def _opacity(run: Simulated) -> dict[int, float]:
    """Chunk → opacity: the first chunk of a stage full, later ones lighter."""
    opacity: dict[int, float] = {}
    for spans in run.stages:
        chunks = sorted({span.op.chunk for span in spans})
        for turn, chunk in enumerate(chunks):
            opacity[chunk] = 1.0 - (1.0 - LIGHTEST) * turn / max(len(chunks) - 1, 1)
    return opacity
