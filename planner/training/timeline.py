"""A pipeline schedule as a picture: one row a stage, time from left to right; for a browser (SVG) or a terminal."""

from __future__ import annotations

from html import escape

from meshplan.catalogs.units import format_duration
from meshplan.planner.training.pipeline.orders import BACKWARD, FORWARD, WEIGHT
from meshplan.planner.training.pipeline.simulation import Simulated, Span

COLOURS = {FORWARD: "#4269d0", BACKWARD: "#efb118", WEIGHT: "#3ca951"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradient"}
WIDTH, ROW, GAP, LEFT, TOP = 1200, 26, 4, 72, 56
# Pixels that a micro-batch's number needs.
LABEL_WIDTH = 15
# Later chunks of a stage are lighter, down to this opacity.
LIGHTEST = 0.45


def timeline_svg(run: Simulated, *, title: str) -> str:
    """The schedule as SVG text.

    Args:
        run: the schedule in time.
        title: above the picture.
    """
    end = run.flushed_s
    scale = (WIDTH - LEFT - GAP) / end
    height = TOP + len(run.stages) * (ROW + GAP) + 40
    shade = _shades(run)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for index, kind in enumerate(_kinds(run)):
        at = LEFT + 130 * index
        parts.append(f'<rect x="{at}" y="32" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{at + 17}" y="42">{NAMES[kind]}</text>')
    for stage, spans in enumerate(run.stages):
        top = TOP + stage * (ROW + GAP)
        idle = run.idle_s[stage] / end
        parts.append(f'<text x="{LEFT - 6}" y="{top + ROW / 2 + 4}" text-anchor="end">stage {stage}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - GAP}" height="{ROW}" fill="#eee">'
            f"<title>stage {stage}: idle {idle:.1%}, at most {run.peak_in_flight[stage]:g} in flight</title></rect>"
        )
        parts += [_box(span, top, scale, shade[span.op.chunk]) for span in spans]
    parts.append(f'<text x="{LEFT}" y="{height - 14}">0</text>')
    parts.append(f'<text x="{WIDTH - GAP}" y="{height - 14}" text-anchor="end">{format_duration(end)}</text></svg>')
    return "\n".join(parts) + "\n"


def _box(span: Span, top: float, scale: float, opacity: float) -> str:
    op, width = span.op, (span.end_s - span.start_s) * scale
    x = LEFT + span.start_s * scale
    box = (
        f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{ROW}" fill="{COLOURS[op.kind]}" '
        f'fill-opacity="{opacity:.2f}" stroke="white" stroke-width="0.5">'
        f"<title>{NAMES[op.kind]}, micro-batch {op.microbatch}, chunk {op.chunk}: "
        f"{format_duration(span.start_s)} to {format_duration(span.end_s)}</title></rect>"
    )
    if width < LABEL_WIDTH:
        return box
    return box + f'<text x="{x + width / 2:.2f}" y="{top + ROW / 2 + 4}" text-anchor="middle">{op.microbatch}</text>'


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


def _shades(run: Simulated) -> dict[int, float]:
    """Chunk → opacity: the first chunk of a stage full, later ones lighter."""
    shades: dict[int, float] = {}
    for spans in run.stages:
        chunks = sorted({span.op.chunk for span in spans})
        for turn, chunk in enumerate(chunks):
            shades[chunk] = 1.0 - (1.0 - LIGHTEST) * turn / max(len(chunks) - 1, 1)
    return shades
