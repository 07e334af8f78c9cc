"""A plan of machines at home as a person reads it: what runs where, how fast, what else there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.no_plan import no_plan_section
from meshplan.cli.reports.parts import effort_text, paragraph, rejected_section
from meshplan.cli.reports.quantities import TICK
from meshplan.planner.core.plan import Interval, Plan


def describe(spec: Mapping[str, Any]) -> str:
    """The question in short, for lists of plans."""
    machines = " + ".join(
        f"{item.get('count', 1)} × {item.get('type') or 'described machine'}" for item in spec.get("devices", ())
    )
    return f"{spec['model']} on {machines}"


def short_answer(document: Mapping[str, Any]) -> str:
    """Engine, machines and the time of a token of the way that was chosen, for lists of plans."""
    chosen = next((row for row in document["alternatives"] if row["why"] == "chosen"), None)
    if chosen is None:
        return ""
    return f"{chosen['engine']} on {chosen['machines']}, {format_duration(chosen['time_per_token_s'])} a token"


def report(plan: Plan, *, width: int) -> str:
    """The complete report; an infeasible plan names what binds and the least change that helps."""
    if not plan.config:
        sections = [_headline(plan, width), no_plan_section(plan.solution, width), rejected_section(plan, width)]
        return "\n".join(section for section in sections if section)
    sections = [
        _headline(plan, width),
        _figures(plan, width),
        _machines(plan, width),
        rendered_rows(top_rows(plan), top_columns(plan), Format.TABLE, title="Ways", width=width),
        rejected_section(plan, width),
        "".join(paragraph(f"Note: {note}.", width, "  ") for note in plan.provenance["notes"]),
    ]
    return "\n".join(section for section in sections if section)


def _headline(plan: Plan, width: int) -> str:
    text = paragraph(f"{describe(plan.spec)}, one request at a time", width)
    if plan.config:
        text += paragraph(f"Run {plan.config['engine']} with weights in {plan.config['weights']}.", width)
        proved = f"optimal under the estimate: the fastest of {plan.solution['num_candidates']:,} ways"
    else:
        proved = "infeasible: no way runs within memory and limits"
    return text + paragraph(f"{proved}; {effort_text(plan.solution)}", width)


def _figures(plan: Plan, width: int) -> str:
    titles = {
        "tokens_per_s": "tokens/s",
        "time_per_token_s": "time of a token",
    }
    rows = [
        {"metric": title, "value": _figure(name, one.value), "between": _between(name, one)}
        for name, title in titles.items()
        if (one := plan.predicted.get(name)) is not None
    ]
    columns = (
        Column(key="metric", title="Expected", wrap=False),
        Column(key="value", title="value", right=True, wrap=False),
        Column(key="between", title="in 9 of 10 cases between", right=True, wrap=False),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width)


def _figure(name: str, value: float) -> str:
    return f"{value:.3g}" if name == "tokens_per_s" else format_duration(value)


def _between(name: str, one: Interval) -> str:
    return f"{_figure(name, one.low)} and {_figure(name, one.high)}"


def _machines(plan: Plan, width: int) -> str:
    columns = (
        Column(key="role", title="Machine", wrap=False),
        Column(key="type", title="type", wrap=False),
        Column(key="address", title="address", optional=True, wrap=False),
        Column(key="layers", title="layers", right=True, optional=True, wrap=False),
        Column(key="memory_bytes", title="holds", right=True, text=format_bytes, wrap=False),
        Column(key="usable_bytes", title="of", right=True, text=format_bytes, wrap=False),
    )
    return rendered_rows(plan.config["machines"], columns, Format.TABLE, width=width)


def top_rows(plan: Plan) -> Sequence[Row]:
    """Rows of the plan's table."""
    return [{**row, "chosen": TICK if row["why"] == "chosen" else " "} for row in plan.alternatives]


def top_columns(plan: Plan) -> Sequence[Column]:
    """Columns of :func:`top_rows`; the format where there are several."""
    formats = {row["weights"] for row in plan.alternatives}
    weights = (Column(key="weights", title="weights", wrap=False),) if len(formats) > 1 else ()
    return (
        Column(key="chosen", title="", wrap=False),
        Column(key="engine", title="engine", wrap=False),
        Column(key="machines", title="machines"),
        *weights,
        Column(key="tokens_per_s", title="tokens/s", right=True, text=lambda value: f"{value:.3g}", wrap=False),
        Column(key="compute_s", title="compute", right=True, text=format_duration, wrap=False),
        Column(key="network_s", title="network", right=True, text=format_duration, wrap=False),
        Column(
            key="drive_s",
            title="drive",
            right=True,
            text=_drive,
            wrap=False,
        ),
    )


def _drive(seconds: float) -> str:
    return format_duration(seconds) if seconds else "–"


def next_commands(plan: Plan, where: str, *, emitted: bool) -> Sequence[str]:
    """The launcher files, unless they were written."""
    if emitted or not plan.config:
        return []
    return [f"meshplan emit {plan.plan_id} --target {plan.config['engine']} --out run{where}"]
