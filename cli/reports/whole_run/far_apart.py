"""Ways to train over sites that a slow network joins, as a person reads them: one table, and what was published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.units import format_bandwidth, format_bytes, format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import percent
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted


def _optional(text: Any) -> Any:
    return lambda value: "–" if value is None else text(value)


COLUMNS = (
    Column(key="mark", title="", wrap=False),
    Column(key="name", title="Over the sites", wrap=False),
    Column(key="sync_steps", title="H", right=True),
    Column(key="overlap_steps", title="τ", right=True),
    Column(key="step_s", title="step", right=True, text=_optional(format_duration), wrap=False),
    Column(key="waits", title="waits", right=True, wrap=False),
    Column(key="tokens_per_s", title="tokens/s", right=True, text=_optional(lambda v: f"{v:,.0f}"), wrap=False),
    Column(key="more", title="more", right=True, wrap=False),
    Column(
        key="effective_tokens_per_s", title="counted", right=True, text=_optional(lambda v: f"{v:,.0f}"), wrap=False
    ),
)


def far_apart_sentence(plan: Plan) -> str:
    """Which way is taken and why; empty without sites."""
    section = plan.far_apart
    if section is None:
        return ""
    return f" Over the sites: {section['chosen']}; {section['why']}."


def devices_text(plan: Plan) -> str:
    """How many devices an answer is about: those of a site where every site works with its own plan."""
    own = counted(plan.config["world_size"], "device")
    section = plan.far_apart
    if section is None or section["chosen"] == section["ways"][0]["name"]:
        return own
    sites = section["sites"]
    if all(one["config"] == sites[0]["config"] for one in sites):
        return f"{own} on each of {len(sites)} sites"
    return f"{own}, the slowest of {len(sites)} sites"


def far_apart_answer(plan: Plan, width: int) -> str:
    """The table, what ``?`` stands for, and what was published of the loss of the way that is taken, and of the fastest
    whose tokens nobody has counted.
    """
    section = plan.far_apart
    if section is None:
        return ""
    unsaid = [row for row in section["ways"] if _more(row) == "?" and row["tokens_per_s"]]
    lines = []
    if unsaid:
        lines.append(
            "more: tokens for the same loss; ?: far_apart.more_tokens does not say how many, so it is not taken."
        )
    shown = [row for row in section["ways"] if row["name"] == section["chosen"] and _more(row) != " "]
    shown += sorted(unsaid, key=lambda row: -row["tokens_per_s"])[:1]
    lines += list(dict.fromkeys(_published(row) for row in shown))
    return far_apart_table(plan, width) + "".join(paragraph(line, width) for line in lines)


def far_apart_table(plan: Plan, width: int) -> str:
    """The ways beside the synchronous plan and each site alone; empty without sites."""
    section = plan.far_apart
    if section is None:
        return ""
    ring = section["ring"]
    title = (
        f"{counted(ring['num_sites'], 'site')}, {format_bandwidth(ring['bytes_per_s'])} and "
        f"{format_duration(ring['latency_s'])} between them"
    )
    table = rendered_rows(way_rows(section), COLUMNS, Format.TABLE, title=title, width=width)
    return table + _refusals(section, width)


def way_rows(section: Mapping[str, Any]) -> list[Row]:
    """Every row of the table."""
    return [
        {
            **row,
            "mark": "✔" if row["name"] == section["chosen"] else " ",
            "waits": _waits(row),
            "more": _more(row),
        }
        for row in section["ways"]
    ]


def _waits(row: Mapping[str, Any]) -> str:
    is_known = row.get("exposed_s") is not None and row["step_s"]
    return percent(row["exposed_s"] / row["step_s"]) if is_known else " "


def _more(row: Mapping[str, Any]) -> str:
    if row["way"] is None or row["way"] == "data-parallel":
        return " "
    return "?" if row["more_tokens"] is None else f"+{row['more_tokens']:.1%}"


def _refusals(section: Mapping[str, Any], width: int) -> str:
    reasons = [f"{row['name']}: {row['reason']}." for row in section["ways"] if row["reason"]]
    return "".join(paragraph(line, width) for line in reasons)


def far_apart_section(plan: Plan, width: int) -> str:
    """The table, how the batch is shared, what each way keeps, and what was published of its loss."""
    section = plan.far_apart
    if section is None:
        return ""
    legend = (
        "H: inner steps between exchanges; τ: how many hide one; waits: share of a mean step that waits for exchanges; "
        "more: tokens for the same loss, by your far_apart.more_tokens (?: not accounted for); counted: tokens/s after "
        "that."
    )
    shares = "; ".join(
        f"{one['name']}: {counted(one['sequences'], 'sequence')} a step on {one['config']['world_size']} devices, "
        f"{format_duration(one['step_s'])}"
        for one in section["sites"]
    )
    lines = [legend, f"{shares}." if shares else ""]
    lines += [_kept(row) for row in section["ways"] if row.get("state_bytes")]
    known = {row["way"]: row for row in section["ways"] if row["way"]}
    lines += [_published(row) for row in known.values()]
    return far_apart_table(plan, width) + "".join(paragraph(line, width) for line in lines if line)


def _published(row: Mapping[str, Any]) -> str:
    """What was published of the loss of a row's way."""
    source = f" ({row['source']})" if row["source"] else ""
    steps, most = row.get("sync_steps"), row["published_steps"][1]
    beyond = f"; H = {steps} is beyond what was published" if steps is not None and steps > most else ""
    return f"Published, {row['way']}: {row['published_loss']}{source}{beyond}."


def _kept(row: Mapping[str, Any]) -> str:
    """What a way keeps beside the plan of a site."""
    text = (
        f"{row['name']} sends {format_bandwidth(row['mean_bytes_per_s'])} from a site on average and keeps "
        f"{format_bytes(row['state_bytes'])} more on the fullest device"
    )
    if row["host_state_bytes"]:
        text += f" and {format_bytes(row['host_state_bytes'])} on a host"
    hiding = row["hiding_bytes_per_s"]
    if hiding:
        over = counted(row["overlap_steps"], "step")
        text += f"; over {over} each of {row['fragments']} fragments needs {format_bandwidth(hiding)}"
    return f"{text}."
