"""An allocation from models and workloads as a person reads it: fleet, replicas, routing, proof, alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_duration, format_usd
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports import stand_alone
from meshplan.cli.reports.no_plan import no_plan_section
from meshplan.cli.reports.parts import effort_text, paragraph, rejected_section
from meshplan.cli.reports.quantities import TICK, bar, latency_name, percent
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

# Rows of the routing table that are shown; --format json has all.
MOST_BUCKETS = 30
# Hours of a schedule that are drawn.
MOST_HOURS = 48

UNIT_COLUMNS = (
    Column(key="offer", title="rent"),
    Column(key="count", title="units", right=True, wrap=False),
    Column(key="num_devices", title="dev. each", right=True, wrap=False),
    Column(key="usd_per_hour_each", title="USD/h each", right=True, text=format_usd, wrap=False),
    Column(key="usd_per_hour", title="USD/h", right=True, text=format_usd, wrap=False),
    Column(key="at_its_cap", title="cap", text=lambda at: "reached" if at else " ", wrap=False),
)


def is_market_plan(plan: Plan) -> bool:
    """Whether this report is for it: capacities were estimated, not given."""
    return "market" in plan.spec


def report(plan: Plan, *, width: int) -> str:
    """The complete report; an infeasible plan names the binding constraint and the least change that helps."""
    if not is_market_plan(plan):
        return stand_alone.report(plan, width=width)
    sections = [headline(plan, width)]
    if plan.answer is None:
        sections += [no_plan_section(plan.solution, width), rejected_section(plan, width)]
    else:
        for fleet in plan.answer["fleets"]:
            sections += [fleet_section(fleet, width)]
        sections += [
            routing_section(plan.answer, width),
            proof_section(plan.answer, width),
            alternatives_section(plan.answer, width),
            schedule_section(plan.answer, width),
        ]
    return "\n".join(section for section in sections if section)


def headline(plan: Plan, width: int) -> str:
    """The question, the status and the gap."""
    spec, solution = plan.spec, plan.solution
    services = spec.get("services") or [spec]
    asked = "; ".join(
        f"{one.get('model')} within "
        + ", ".join(f"{latency_name(key)} ≤ {format_duration(limit)}" for key, limit in one.get("slo", {}).items())
        for one in services
    )
    least = "" if solution["objective"] is None else _objective_text(spec, solution["objective"])
    text = f"{asked}, on {counted(len(spec['market']['offers']), 'node type')}"
    if solution["status"] == "infeasible":
        known = "infeasible: no fleet meets every SLO"
    elif solution.get("stopped"):
        known = f"feasible: {least}; its replay was stopped before it could judge the SLOs"
    elif solution["gap"]:
        known = f"feasible: {least}, at most {percent(solution['gap'])} above the least"
    else:
        known = f"optimal under the estimate: {least} is the least"
    replays = (plan.answer or {}).get("replays", ())
    if any(replay["note"] for replay in replays):
        known += "; not all of it was replayed"
    elif solution.get("kept") is not None:
        known += "; every SLO is met in replay" if solution["kept"] else "; AN SLO IS VIOLATED IN REPLAY"
    return paragraph(text, width) + paragraph(f"{known}; {effort_text(solution)}", width)


_UNITS = {"cost": "USD/h", "power": "W at full load", "num_devices": "devices"}


def _objective_text(spec: Mapping[str, Any], value: float) -> str:
    """What the fleet is least in, with its unit."""
    kind = str(spec.get("objective", "cost"))
    return f"{value:,.2f} {_UNITS[kind]}" if kind == "cost" else f"{value:,.6g} {_UNITS[kind]}"


def top_rows(plan: Plan) -> Sequence[Row]:
    """The units to rent: the table of the machine-readable forms."""
    if not is_market_plan(plan):
        return stand_alone.top_rows(plan)
    if plan.answer is None:
        return []
    return [unit for fleet in plan.answer["fleets"] for unit in fleet["units"]]


def describe(spec: Mapping[str, Any]) -> str:
    """The question in short, for lists of plans."""
    return stand_alone.describe(spec)


def short_answer(document: Mapping[str, Any]) -> str:
    """What an hour of the fleet costs, for lists of plans."""
    cost = document["predicted"].get("usd_per_hour")
    return "" if cost is None else f"{format_usd(cost['value'])}/h"


def top_columns(plan: Plan) -> Sequence[Column]:
    """Columns of :func:`top_rows`."""
    return UNIT_COLUMNS if is_market_plan(plan) else stand_alone.top_columns(plan)


def next_commands(plan: Plan, where: str, *, emitted: bool) -> Sequence[str]:
    """Write the files of the fleet."""
    is_left = is_market_plan(plan) and not emitted
    return [f"meshplan emit {plan.plan_id}{where} --out fleet"] if is_left else []


# --- fleet ------------------------------------------------------------------------------------------------------------


def fleet_section(fleet: Mapping[str, Any], width: int) -> str:
    """What to rent and what runs on it."""
    named = ", ".join(name for name in fleet["scenarios"] if name)
    title = f"Fleet at {fleet['usd_per_hour']:,.2f} USD/h" + (f" ({named})" if named else "")
    text = rendered_rows(fleet["units"], UNIT_COLUMNS, Format.TABLE, title=title, width=width)
    rows = [
        {**row, "full": max(row["utilization"], default=0.0), "spares": row["spare"] or None}
        for row in fleet["replicas"]
    ]
    columns = (
        Column(key="kind", title="replicas"),
        Column(key="count", title="count", right=True, wrap=False),
        Column(key="spares", title="spare", right=True, wrap=False, optional=True),
        Column(key="num_devices", title="dev.", right=True, wrap=False),
        Column(key="full", title="filled to", right=True, text=percent, wrap=False),
        Column(key="ceiling", title="ceiling", right=True, text=percent, wrap=False),
    )
    return f"{text}\n{rendered_rows(rows, columns, Format.TABLE, width=width)}"


# --- routing ----------------------------------------------------------------------------------------------------------


def routing_section(answer: Mapping[str, Any], width: int) -> str:
    """Where each bucket goes, in the first scenario."""
    several = len(answer["services"]) > 1
    rows = [
        {
            "service": service["name"],
            "input": _range(bucket["input_tokens"]),
            "output": _range(bucket["output_tokens"]),
            "rate": bucket["scenarios"][0]["request_rate_per_s"],
            "goes": ", ".join(f"{percent(share)} {kind}" for kind, share in bucket["scenarios"][0]["weights"].items()),
            "usd": bucket["scenarios"][0]["usd_per_million_requests"],
        }
        for service in answer["services"]
        for bucket in service["buckets"]
    ]
    columns = (
        *((Column(key="service", title="service"),) if several else ()),
        Column(key="input", title="input", right=True, wrap=False),
        Column(key="output", title="output", right=True, wrap=False),
        Column(key="rate", title="req/s", right=True, text=lambda rate: f"{rate:.3g}", wrap=False),
        Column(key="usd", title="$/M req.", right=True, text=lambda usd: f"{usd:,.2f}", wrap=False),
        Column(key="goes", title="goes to"),
    )
    shown = rows[:MOST_BUCKETS]
    title = "Routing" if len(shown) == len(rows) else f"Routing ({len(shown)} of {len(rows)} buckets)"
    return rendered_rows(shown, columns, Format.TABLE, title=title, width=width)


def _range(ends: Sequence[int]) -> str:
    return f"{ends[0]}–{ends[1]}"


# --- proof ------------------------------------------------------------------------------------------------------------


def proof_section(answer: Mapping[str, Any], width: int) -> str:
    """Attainment of each SLO in the replay."""
    rows = [
        {**slo, "scenario": replay["scenario"] or None} for replay in answer["replays"] for slo in replay["promises"]
    ]
    if not rows:
        return paragraph("Not replayed.", width)
    several = len({row["service"] for row in rows}) > 1
    columns = (
        Column(key="is_kept", title="", text=lambda is_met: TICK if is_met else "✗", wrap=False),
        Column(key="scenario", title="scenario", optional=True),
        *((Column(key="service", title="service"),) if several else ()),
        Column(key="promise", title="SLO", wrap=False),
        Column(key="limit_s", title="limit", right=True, text=format_duration, wrap=False),
        Column(key="attained", title="attained", right=True, derive=lambda row: _share(row, "attained"), wrap=False),
        Column(key="lower_limit", title="95 % limit", right=True, derive=lambda row: _share(row, "lower_limit")),
    )
    first = answer["replays"][0]
    title = (
        f"Replay of {counted(first['num_requests'], 'request')} in {counted(first['num_runs'], 'run')}, "
        f"burstiness {first['burstiness']:g}"
    )
    text = rendered_rows(rows, columns, Format.TABLE, title=title, width=width)
    notes = [replay["note"] for replay in answer["replays"] if replay["note"]]
    return text + "".join(paragraph(f"Not replayed: {note}", width) for note in notes)


def _share(row: Row, key: str) -> str:
    """A share in percent with two decimals; for an SLO on a mean, seconds."""
    return format_duration(row[key]) if "_mean_" in row["promise"] else f"{100.0 * row[key]:.2f} %"


# --- alternatives -----------------------------------------------------------------------------------------------------


def alternatives_section(answer: Mapping[str, Any], width: int) -> str:
    """Cost of other fleets, and cost against the SLO as bars."""
    found = answer["alternatives"]
    rows = [{"slo": f"× {row['slo_factor']:g}", **row} for row in found["pareto"]]
    most = max((row["objective"] for row in rows if row["objective"] is not None), default=0.0)
    columns = (
        Column(key="slo", title="SLO", right=True, wrap=False),
        Column(
            key="objective", title=_UNITS[answer["objective"]], right=True, text=lambda cost: f"{cost:,.2f}", wrap=False
        ),
        Column(
            key="objective",
            title="",
            derive=lambda row: bar(row["objective"] / most) if most and row["objective"] is not None else "no plan",
            wrap=False,
        ),
    )
    text = rendered_rows(rows, columns, Format.TABLE, title="Cost against SLO (not replayed)", width=width)
    return text + "".join(paragraph(f"- {note}", width) for note in answer["notes"])


# --- schedule ---------------------------------------------------------------------------------------------------------


def schedule_section(answer: Mapping[str, Any], width: int) -> str:
    """The fleet over the hours, as bars, and what switching saves."""
    schedule = answer.get("schedule")
    if not schedule:
        return ""
    hours = schedule["hours"][:MOST_HOURS]
    most = max(row["usd_per_hour"] for row in schedule["hours"])
    rows = [
        {**row, "units": ", ".join(f"{count} {name}" for name, count in row["units"].items()) or "nothing"}
        for row in hours
    ]
    columns = (
        Column(key="hour", title="hour", right=True, wrap=False),
        Column(key="rate_factor", title="traffic", right=True, text=lambda rate: f"× {rate:.3g}", wrap=False),
        Column(key="usd_per_hour", title="USD/h", right=True, text=format_usd, wrap=False),
        Column(key="usd_per_hour", title="", derive=lambda row: bar(row["usd_per_hour"] / most, 12), wrap=False),
        Column(key="units", title="fleet"),
    )
    title = f"Schedule ({len(rows)} of {len(schedule['hours'])} hours)"
    text = rendered_rows(rows, columns, Format.TABLE, title=title, width=width)
    text_below = (
        f"{schedule['usd']:,.2f} USD over {counted(len(schedule['hours']), 'hour')}, "
        f"{schedule['switching_usd']:,.2f} of it for "
        f"{counted(schedule['num_switches'], 'change')}; at most {percent(schedule['gap'])} above the least; "
        f"the fleet of the peak throughout would cost {schedule['constant_usd']:,.2f} USD."
    )
    replays = schedule["replays"]
    if replays:
        met, hours = sum(one["is_kept"] for one in replays), sum(one["num_hours"] for one in replays)
        text_below += (
            f" {met} of the {len(replays)} distinct fleets ({counted(hours, 'hour')}) meet every SLO in replay."
        )
        if met < len(replays):
            text_below += " Lower constraints.max_utilization for more headroom off the peak."
    return text + paragraph(text_below, width)
