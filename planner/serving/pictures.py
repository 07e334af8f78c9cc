"""A serving plan as a page: its Pareto front, and the requests and the cache of its simulation over time.

One self-contained HTML file without scripts: pictures in SVG whose points tell more on hovering, and a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from meshplan.planner.core.plan import Plan

WIDTH, HEIGHT, MARGIN = 720, 420, 64
KEPT_COLOUR, BROKEN_COLOUR, CHOSEN_COLOUR = "#4269d0", "#c4c8d0", "#d1495b"
# Name in the plan's series → (words, colour); the cache has the scale on the right.
SERIES = {
    "decoding": ("decoding", "#4269d0"),
    "prefilling": ("in prefill", "#efb118"),
    "queued": ("queued", "#d1495b"),
    "kv_use": ("KV cache in use (right)", "#6b7280"),
}
# Lines of the grid along each axis.
TICKS = 5


def pareto_page(plan: Plan) -> str:
    """The page of a serving plan.

    Args:
        plan: of the kind ``serving``, with an answer.
    """
    answer: Mapping[str, Any] = plan.answer or {}
    points: Sequence[Mapping[str, Any]] = answer.get("pareto", ())
    title = f"{plan.spec['model']}: plan {plan.plan_id}"
    rows = "".join(
        f"<tr><td>{'yes' if point['keeps_promises'] else 'no'}</td>"
        f"<td class=n>{point['tokens_per_s_per_user']:.1f}</td><td class=n>{point['tokens_per_s_per_device']:,.0f}</td>"
        f"<td class=n>{point['num_running']}</td><td>{escape(point['label'])}</td>"
        f"<td>{escape(point['quantization'])}</td><td>{escape(point['node_type'])}</td></tr>\n"
        for point in points
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>\n<style>body{{font:14px sans-serif;margin:2em}}"
        "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}"
        f".n{{text-align:right}}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        "<p>Each point is a worker at a load that no other beats in both figures, in closed form. "
        f'<span style="color:{KEPT_COLOUR}">●</span> keeps every promise, '
        f'<span style="color:{BROKEN_COLOUR}">●</span> breaks one, '
        f'<span style="color:{CHOSEN_COLOUR}">◆</span> the plan, simulated.</p>\n'
        f"{_svg(points, _chosen(plan))}\n"
        "<table><tr><th>promises kept</th><th>tokens/s of a user</th><th>tokens/s of a device</th>"
        f"<th>running</th><th>worker</th><th>weights</th><th>nodes</th></tr>\n{rows}</table>\n"
        f"{_over_time(answer.get('series', {}))}</body></html>\n"
    )


def _over_time(series: Mapping[str, Sequence[float]]) -> str:
    """Requests in each state and the share of the cache in use, over the simulated time."""
    if not series:
        return ""
    ends = series["end_s"]
    most = max(*series["decoding"], *series["prefilling"], *series["queued"], 1.0)
    wide, high = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    parts = [
        f'<h2>The simulation over time</h2>\n<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in range(TICKS + 1):
        x, y = MARGIN + wide * tick / TICKS, HEIGHT - MARGIN - high * tick / TICKS
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{most * tick / TICKS:,.0f}</text>')
        parts.append(f'<text x="{WIDTH - MARGIN + 6}" y="{y + 4:.1f}">{tick / TICKS:.0%}</text>')
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{ends[-1] * tick / TICKS:,.0f} s</text>'
        )
    for place, (name, told) in enumerate(SERIES.items()):
        scale = 1.0 if name == "kv_use" else most
        line = " ".join(
            f"{MARGIN + wide * end / ends[-1]:.1f},{HEIGHT - MARGIN - high * value / scale:.1f}"
            for end, value in zip(ends, series[name], strict=True)
        )
        text, colour = told
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{MARGIN + 150 * place}" y="{MARGIN - 20}" fill="{colour}">{text}</text>')
    return "\n".join([*parts, "</svg>"])


def _chosen(plan: Plan) -> tuple[float, float] | None:
    """(tokens/s of a user, tokens/s of a device) of the plan itself; None where answers have one token."""
    tpot = plan.predicted.get("tpot_mean_s")
    if tpot is None:
        return None
    return 1.0 / tpot.value, plan.predicted["output_tokens_per_s_per_device"].value


def _svg(points: Sequence[Mapping[str, Any]], chosen: tuple[float, float] | None) -> str:
    places = [(point["tokens_per_s_per_user"], point["tokens_per_s_per_device"]) for point in points]
    drawn = [*places, *([chosen] if chosen else [])]
    if not drawn:
        return "<p>Answers of one token have no front.</p>"
    most_x, most_y = (1.05 * max(place[axis] for place in drawn) for axis in (0, 1))

    def at(place: tuple[float, float]) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * place[0] / most_x
        return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * place[1] / most_y

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in range(TICKS + 1):
        x, y = at((most_x * tick / TICKS, most_y * tick / TICKS))
        parts.append(
            f'<path d="M{x:.1f} {MARGIN}V{HEIGHT - MARGIN}M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#e5e5e5"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{most_x * tick / TICKS:,.0f}</text>'
        )
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{most_y * tick / TICKS:,.0f}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, places))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#97a3b6"/>')
    for point, place in zip(points, places, strict=True):
        x, y = at(place)
        colour = KEPT_COLOUR if point["keeps_promises"] else BROKEN_COLOUR
        told = escape(f"{point['label']}, {point['num_running']} running: {place[0]:.1f} and {place[1]:,.0f} tokens/s")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{told}</title></circle>')
    if chosen:
        x, y = at(chosen)
        shape = f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z"
        parts.append(f'<path d="{shape}" fill="{CHOSEN_COLOUR}"><title>the plan, simulated</title></path>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">tokens/s of one user</text>')
    middle = HEIGHT / 2
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        "tokens/s of one device</text>"
    )
    return "\n".join([*parts, "</svg>"])
