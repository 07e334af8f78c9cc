"""What the reports of several kinds share: paragraphs, clusters, effort, and what was rejected."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration, format_usd
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.planner.core.certificate import AGREES, DISAGREES, UNFINISHED
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

# Rejection reasons that are listed by name; the rest is counted.
MOST_REASONS = 8


def cluster_text(cluster: Mapping[str, Any]) -> str:
    """The hardware of a spec: node groups, or devices by node."""
    if cluster.get("nodes"):
        return " + ".join(_nodes_text(group) for group in cluster["nodes"])
    devices = cluster.get("devices", {})
    return f"{counted(devices.get('nodes', 0), 'node')} of {devices.get('per_node')} × {devices.get('type')}"


def _nodes_text(group: Mapping[str, Any]) -> str:
    """Nodes of one type, and how many of their devices are used where not all may be."""
    of = "its devices" if group["count"] == 1 else "the devices of each"
    part = f" ({group['devices']} of {of})" if group.get("devices") else ""
    return f"{group['count']} × {group['type']}{part}"


def machines_text(spec: Mapping[str, Any]) -> str:
    """The hardware that a question may use: its cluster, and how many of the devices where not all."""
    most = (spec.get("constraints") or {}).get("max_devices")
    part = f", {counted(most, 'device')} at most" if most else ""
    return f"{cluster_text(spec.get('cluster', {}))}{part}"


def model_on_cluster(spec: Mapping[str, Any]) -> str:
    """The question in short, for lists of plans."""
    return f"{spec['model']} on {machines_text(spec)}"


def effort_text(solution: Mapping[str, Any]) -> str:
    """Solver and processor time; a plan file has no clock times."""
    spent = solution.get("cpu_s")
    return str(solution["solver"]) if spent is None else f"{solution['solver']}, {spent:.2f} s of CPU"


def other_degree(tensor_parallel: int, num_devices: int) -> int | None:
    """Another tensor-parallel degree that the devices have room for; None where there is one device.

    >>> other_degree(8, 64), other_degree(1, 8), other_degree(1, 1)
    (4, 2, None)
    """
    if num_devices < 2:  # noqa: PLR2004 - one device has no other degree
        return None
    return tensor_parallel // 2 if tensor_parallel > 1 else 2


def paragraph(text: str, width: int, indent: str = "") -> str:
    """Wrapped text, newline at the end; an address stays in one piece, so that it can be opened."""
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def certificate_text(plan: Plan, width: int) -> str:
    """What a second, independent way says of the plan; empty where nobody asked."""
    certificate = plan.certificate
    if certificate is None:
        return ""
    verdict = {AGREES: "agrees", DISAGREES: "DISAGREES", UNFINISHED: "did not come to an end"}[certificate["outcome"]]
    text = paragraph(f"Second opinion {verdict}: {certificate['method']}; {certificate['covers']}", width)
    lines = [
        f"{'yes' if check['agrees'] else 'NO'}: {check['what']}: stated {_figure(check['stated'])}, "
        f"found {_figure(check['found'])}"
        for check in certificate["checks"]
    ]
    return "\n" + text + "".join(paragraph(f"  {line}", width, "    ") for line in lines)


def _figure(value: float | str | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def rejected_section(plan: Plan, width: int) -> str:
    """Rejected candidates: reason, count, the nearest miss."""
    rows = [row for row in plan.rejected if row["count"]]
    if not rows:
        return ""
    shown = rows[:MOST_REASONS]
    columns = (
        Column(key="reason", title="Rejected because"),
        Column(key="count", title="count", right=True, text=lambda count: f"{count:,}", wrap=False),
        Column(key="nearest_miss", title="example or nearest miss", derive=_miss),
    )
    text = rendered_rows(shown, columns, Format.TABLE, width=width)
    more = len(rows) - len(shown)
    return text + (f"and {counted(more, 'more reason')}: --format json lists them\n" if more else "")


def _miss(row: Row) -> str:
    example, excess = row.get("example"), row.get("nearest_miss")
    if isinstance(example, str):
        return example
    if excess is None or not isinstance(example, Mapping):
        return ""
    # Only a training plan names a configuration here: other answers do not pay for what training is made of.
    from meshplan.cli.reports.configuration import config_text

    limit = str(row["reason"]).removeprefix("over the limit: ")
    times = dict.fromkeys(("step time", "time of the run"), format_duration)
    format_excess = {**times, "cost of the run": format_usd}.get(limit, format_bytes)
    return f"{format_excess(excess)} too much with {config_text(example)}"
