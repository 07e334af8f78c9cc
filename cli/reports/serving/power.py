"""A plan under a power budget: what one copy draws, how many fit, and what the safety net costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.units import format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import latency_name, metric_text, percent
from meshplan.planner.core.text import counted

# The smallest share of windows that is shown by its digits.
_LEAST_SHARE = 1e-6


def power_report(found: Mapping[str, Any], width: int) -> str:
    """The answer as text; ``found`` is the document of ``meshplan explain PLAN --power-budget``."""
    sections = [_verdict(found, width), _one_copy(found, width), _copies(found, width)]
    by_count = {row["copies"]: row for row in sorted(found["copies"], key=lambda row: int(row["copies"]))}
    net = [paragraph(text, width, "  ") for text in map(_net_text, by_count.values()) if text]
    if net:
        sections.append("Safety net: power limits under which the copies never exceed the budget\n" + "".join(net))
    sections.append("Not counted\n" + "".join(paragraph(f"- {line}", width, "  ") for line in found["not_counted"]))
    return "\n".join(sections)


def _verdict(found: Mapping[str, Any], width: int) -> str:
    """The answer in one sentence, by the most cautious count of watts."""
    rated, *_, expected, upper = found["copies"]
    return paragraph(
        f"{_watts(found['power_budget_w'])} hold {counted(upper['copies'], 'copy', 'copies')} of plan "
        f"{found['plan_id']} where the budget may be exceeded in {_share_text(found['risk'])} of the windows of "
        f"{found['window_s']:g} s: {expected['copies']} by expected watts, {upper['copies']} by the upper "
        f"end of their interval; {rated['copies']} by rated power.",
        width,
    )


def _one_copy(found: Mapping[str, Any], width: int) -> str:
    one = found["one_copy"]
    rows = [{"watts": name, **one[key]} for name, key in (("expected", "expected"), ("upper end", "upper"))]
    columns = (
        Column(key="watts", title="One copy draws"),
        *(
            Column(key=key, title=key.removesuffix("_w"), right=True, text=_watts)
            for key in ("mean_w", "p50_w", "p99_w", "peak_w")
        ),
    )
    hosts = counted(one["num_hosts"], "host")
    stated = f"{hosts} of {_watts(one['host_w'])} included" if one["host_w"] is not None else "boards alone"
    text = (
        f"Rated {_watts(one['rated_w'])}: {counted(one['num_devices'], 'device')} on {hosts}, {stated}; "
        f"{one['num_windows']:,} windows were simulated."
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width) + paragraph(text, width)


def _copies(found: Mapping[str, Any], width: int) -> str:
    columns = (
        Column(key="by", title="Copies by"),
        Column(key="copies", title="copies", right=True),
        Column(key="oversubscription", title="rated / budget", right=True, text=percent),
        Column(key="exceedance", title="exceeded", right=True, text=_share_text),
        Column(key="exceedance_upper", title="upper end", right=True, text=_share_text),
        Column(key="limits_w", title="board limit", right=True, derive=_limits_text),
    )
    return rendered_rows(found["copies"], columns, Format.TABLE, width=width)


def _limits_text(row: Row) -> str:
    limits = row.get("limits_w")
    return " / ".join(f"{limit:.0f} W" for limit in limits) if limits else ""


def _net_text(row: Row) -> str:
    """What the limit of so many copies costs; empty where none is needed."""
    copies = counted(row["copies"], "copy", "copies")
    if "without_price" in row:
        return f"- {copies}, boards at {_limits_text(row) or 'no limit'}: {row['without_price']}"
    if not row.get("limits_w"):
        return ""
    shown = [key for key in ("ttft_p99_s", "tpot_p95_s") if row[key] is not None]
    reached = ", ".join(f"{latency_name(key)} {format_duration(row[key])}" for key in shown)
    slos = "SLOs met" if row["slo_met"] else f"SLO violated: {'; '.join(row['violated'])}"
    return f"- {copies}, boards at {_limits_text(row)}: {reached}; {slos}"


def _share_text(share: float) -> str:
    """A share of windows.

    >>> _share_text(0.0), _share_text(2e-8), _share_text(0.001), _share_text(0.25)
    ('never', '< 1 in 1,000,000', '1 in 1,000', '25.0%')
    """
    if share <= 0.0:
        return "never"
    if share < _LEAST_SHARE:
        return f"< 1 in {round(1 / _LEAST_SHARE):,}"
    return percent(share) if share >= 0.1 else f"1 in {round(1.0 / share):,}"  # noqa: PLR2004 - ten of a hundred


def _watts(value: float) -> str:
    return metric_text("power_w", value)
