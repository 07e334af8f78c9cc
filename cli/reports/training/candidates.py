"""The candidates of a training plan side by side: the best ones, and why the well-known others lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.configuration import COSTS, TOP_COLUMNS, layers_text
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import signed_percent
from meshplan.cli.reports.training import mixed
from meshplan.planner.core.plan import Plan

_RATE = "tokens_per_s_per_device"


def top_rows(plan: Plan) -> list[Row]:
    """The best candidates of a plan, the chosen one first: its choices and figures side by side."""
    if mixed.is_mixed(plan.config):
        return list(mixed.rows_of(plan))
    return [
        {
            "chosen": row["chosen"],
            **{key: value for key, value in row["config"].items() if key != "layers_per_chunk"},
            "iteration_s": row["iteration_s"],
            **_judged(plan, row),
            "safe_bytes": row["safe_bytes"],
        }
        for row in plan.alternatives
        if "chosen" in row
    ] or _only_row(plan)


def _only_row(plan: Plan) -> list[Row]:
    """A plan of one pinned configuration has no runners-up."""
    if not plan.config:
        return []
    return [
        {
            "chosen": plan.solution["status"] != "infeasible",
            **{key: value for key, value in plan.config.items() if key != "layers_per_chunk"},
            **{name: plan.predicted[name].value for name in ("iteration_s", _metric(plan)) if name in plan.predicted},
            "safe_bytes": plan.memory["worst"]["safe_bytes"],
        }
    ]


def _judged(plan: Plan, row: Mapping[str, Any]) -> Row:
    """What the plans are compared by beside their step: joules or money where these are minimised, else their rate."""
    if row.get("objective") is not None:
        return {_metric(plan): row["objective"]}
    return {_RATE: _token_rate(row) * _filled(plan)}


def _metric(plan: Plan) -> str:
    return COSTS.get(str(plan.spec.get("objective")), (_RATE, ""))[0]


def _filled(plan: Plan) -> float:
    """Trained tokens over tokens of sequences: below 1 where whole documents leave padding."""
    return 1.0 if plan.lengths is None else float(plan.lengths["documents"]["filled"])


def _token_rate(row: Mapping[str, Any]) -> float:
    config = row["config"]
    tokens = config["global_batch_size"] * config["sequence_length"]
    return float(tokens / row["iteration_s"] / config["world_size"])


def top_columns(plan: Plan) -> Sequence[Column]:
    """Columns of :func:`top_rows`."""
    return mixed.COLUMNS if mixed.is_mixed(plan.config) else TOP_COLUMNS


def top_section(plan: Plan, width: int) -> str:
    """The table of the best candidates, the chosen one ticked."""
    rows = top_rows(plan)
    title = f"The best {len(rows)} plans" if len(rows) > 1 else "The plan"
    return rendered_rows(rows, TOP_COLUMNS, Format.TABLE, title=title, width=width) + _splits_text(plan, width)


def _splits_text(plan: Plan, width: int) -> str:
    """The layers of each pipeline chunk, where they are all that tells two candidates of the table apart."""
    configs = [row["config"] for row in plan.alternatives if "chosen" in row]
    choices = [{key: value for key, value in config.items() if key != "layers_per_chunk"} for config in configs]
    twins = [place for place, choice in enumerate(choices) if choices.count(choice) > 1]
    if not twins:
        return ""
    splits = "; ".join(f"row {place + 1}: {layers_text(configs[place]['layers_per_chunk'])}" for place in twins)
    return paragraph(f"Layers of each pipeline chunk, {splits}.", width)


def alternative_rows(plan: Plan) -> list[Row]:
    """The well-known other choices of a plan."""
    return [row for row in plan.alternatives if "reason" in row]


def alternatives_section(plan: Plan, width: int) -> str:
    """Why each well-known alternative lost."""
    rows = alternative_rows(plan)
    if not rows:
        return ""
    columns = (
        Column(key="name", title="Why not …?"),
        Column(key="iteration_s", title="step", right=True, text=format_duration, wrap=False),
        Column(key="slower_by", title="", right=True, text=signed_percent, wrap=False),
        Column(key="dearer_by", title=cost_title(plan), right=True, text=signed_percent, optional=True, wrap=False),
        Column(key="reason", title="because", derive=reason_text),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width)


def cost_title(plan: Plan) -> str:
    """What is minimised, where it is neither time nor devices; empty otherwise."""
    return COSTS.get(str(plan.spec.get("objective")), (_RATE, ""))[1]


def reason_text(row: Row) -> str:
    """The reason without the change of the step time, which has its own column."""
    reason, change = str(row["reason"]), row.get("slower_by")
    if change is None:
        return reason
    return reason.removeprefix(f"{change:+.1%} step time").removeprefix(":").strip()
