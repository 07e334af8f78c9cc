"""A serving plan as a page: its Pareto front, and the requests and the cache of its simulation over time.

One self-contained HTML file without scripts: pictures in SVG whose points have tooltips, and a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.drawing import MUTED, PALETTE, Axis, Drawing, Plot, html_page
from meshplan.catalogs.untrusted.quoting import html_text as escape
from meshplan.planner.core.plan import Plan

WIDTH, HEIGHT, MARGIN = 720, 420, 64
MET_COLOUR, VIOLATED_COLOUR, CHOSEN_COLOUR = PALETTE[0], "#c4c8d0", "#d1495b"
# Name in the plan's series → (label, colour); the KV cache has the scale on the right.
SERIES = {
    "decoding": ("decoding", PALETTE[0]),
    "prefilling": ("in prefill", PALETTE[1]),
    "queued": ("queued", "#d1495b"),
    "kv_use": ("KV cache in use (right)", "#6b7280"),
}
_INSIDE = (MARGIN, MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN)


def pareto_page(plan: Plan) -> str:
    """The page of a serving plan.

    Args:
        plan: its kind is ``serving``, and it has an answer.
    """
    answer: Mapping[str, Any] = plan.answer or {}
    points: Sequence[Mapping[str, Any]] = answer.get("pareto", ())
    title = f"{plan.spec['model']}: plan {plan.plan_id}"
    rows = "".join(
        f"<tr><td>{'yes' if point['keeps_promises'] else 'no'}</td>"
        f"<td class=n>{point['tokens_per_s_per_user']:.1f}</td><td class=n>{point['tokens_per_s_per_device']:,.0f}</td>"
        f"<td class=n>{escape(point['num_running'])}</td><td>{escape(point['label'])}</td>"
        f"<td>{escape(point['quantization'])}</td><td>{escape(point['node_type'])}</td></tr>\n"
        for point in points
    )
    return html_page(
        title,
        "<p>Each point is a worker at a load that no other beats in both figures, in closed form. "
        f'<span style="color:{MET_COLOUR}">●</span> meets the SLO, '
        f'<span style="color:{VIOLATED_COLOUR}">●</span> violates it, '
        f'<span style="color:{CHOSEN_COLOUR}">◆</span> the plan, simulated.</p>\n'
        f"{_front(points, _chosen(plan))}\n"
        "<table><tr><th>SLO met</th><th>tokens/s per user</th><th>tokens/s per GPU</th>"
        f"<th>running</th><th>worker</th><th>weights</th><th>nodes</th></tr>\n{rows}</table>\n"
        f"{_over_time(answer.get('series', {}))}",
    )


def _over_time(series: Mapping[str, Sequence[float]]) -> str:
    """Requests in each state and the share of the KV cache in use, over the simulated time."""
    if not series:
        return ""
    drawing = Drawing(WIDTH, HEIGHT)
    time = Axis(0.0, series["end_s"][-1])
    requests = Axis(0.0, max(*series["decoding"], *series["prefilling"], *series["queued"], 1.0))
    left = Plot(drawing, time, requests, *_INSIDE)
    right = Plot(drawing, time, Axis(0.0, 1.0), *_INSIDE)
    left.mark_x("{:,.0f} s".format)
    left.mark_y("{:,.0f}".format)
    right.mark_y("{:.0%}".format, on_right=True)
    for name, (_, colour) in SERIES.items():
        plot = right if name == "kv_use" else left
        drawing.curve(itertools.starmap(plot.at, zip(series["end_s"], series[name], strict=True)), stroke=colour)
    drawing.legend(MARGIN, MARGIN - 24, SERIES.values(), step=(150, 0))
    return f"<h2>The simulation over time</h2>\n{drawing}"


def _chosen(plan: Plan) -> tuple[float, float] | None:
    """(tokens/s per user, tokens/s per GPU) of the plan itself; None where answers have one token."""
    tpot = plan.predicted.get("tpot_mean_s")
    if tpot is None:
        return None
    return 1.0 / tpot.value, plan.predicted["output_tokens_per_s_per_device"].value


def _front(points: Sequence[Mapping[str, Any]], chosen: tuple[float, float] | None) -> str:
    places = [(point["tokens_per_s_per_user"], point["tokens_per_s_per_device"]) for point in points]
    drawn = [*places, *([chosen] if chosen else [])]
    if not drawn:
        return "<p>Answers of one token have no front.</p>"
    drawing = Drawing(WIDTH, HEIGHT)
    most_x, most_y = (1.05 * max(place[axis] for place in drawn) for axis in (0, 1))
    plot = Plot(drawing, Axis(0.0, most_x), Axis(0.0, most_y), *_INSIDE)
    plot.mark_x("{:,.0f}".format)
    plot.mark_y("{:,.0f}".format)
    plot.name_axes("tokens/s per user", "tokens/s per GPU")
    drawing.curve(itertools.starmap(plot.at, places), stroke=MUTED)
    for point, place in zip(points, places, strict=True):
        colour = MET_COLOUR if point["keeps_promises"] else VIOLATED_COLOUR
        hint = f"{point['label']}, {point['num_running']} running: {place[0]:.1f} and {place[1]:,.0f} tokens/s"
        drawing.circle(*plot.at(*place), 5, fill=colour, hint=hint)
    if chosen:
        x, y = plot.at(*chosen)
        drawing.path(f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z", fill=CHOSEN_COLOUR, hint="the plan, simulated")
    return str(drawing)
