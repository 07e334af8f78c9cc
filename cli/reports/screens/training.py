"""The first screen of a training plan: its step, the fullest device, and why not the well-known other choices."""

from __future__ import annotations

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.cli.render import Format, rendered_rows
from meshplan.cli.reports.configuration import TOP_COLUMNS, config_text
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import gib, interval_text, metric_text, percent, signed_percent
from meshplan.cli.reports.screens.parts import MOST_BARS, bar_line, fitted, side_by_side, time_bars
from meshplan.cli.reports.training import candidates, figures, mixed
from meshplan.cli.reports.training import plan as training
from meshplan.cli.reports.whole_run.far_apart import devices_text, far_apart_answer, far_apart_sentence
from meshplan.cli.reports.whole_run.forecast import run_sentence
from meshplan.cli.reports.whole_run.lengths import lengths_sentence
from meshplan.planner.core.plan import Plan

REPORT = training


def screen(plan: Plan, width: int) -> str:
    """The first screen of a plan."""
    head = [
        training.headline(plan, width),
        paragraph(answer(plan), width),
    ]
    tail = [
        _bars(plan),
        _why_not(plan, width),
        figures.calibration_text(plan, width),
    ]
    mapping = training.mapping_section(plan, width)
    return fitted([*head, mapping], lambda count: _table(plan, count, width), tail)


def _bars(plan: Plan) -> str:
    """Memory and time side by side; the table of ways over sites takes their place."""
    if plan.far_apart is not None:
        return ""
    return side_by_side(_memory_bars(plan), time_bars(plan.breakdown, "Where the step's time goes"))


def answer(plan: Plan) -> str:
    """The plan and what it will take, in one sentence or two."""
    step, predicted = plan.predicted["iteration_s"], plan.predicted
    between = interval_text("iteration_s", {"low": step.low, "high": step.high})
    text = (
        f"Answer: {config_text(plan.config)} on {devices_text(plan)}: {format_duration(step.value)} a "
        f"step ({between}), {metric_text('tokens_per_s', predicted['tokens_per_s'].value)} tokens/s, "
        f"MFU {percent(predicted['mfu'].value)}."
    )
    run = [metric_text(key, predicted[key].value) for key in ("run_time_s", "usd_per_run") if key in predicted]
    if plan.spec.get("objective") == "energy":
        text += f" A step draws {metric_text('energy_j_per_step', predicted['energy_j_per_step'].value)}."
    if run:
        text += f" The run takes {' and '.join(run)}."
    text += run_sentence(plan) + lengths_sentence(plan) + far_apart_sentence(plan)
    worst = plan.memory["worst"]["safe_bytes"]
    return (
        f"{text} The fullest device holds at most {format_bytes(worst)} of {format_bytes(plan.memory['limit_bytes'])}."
    )


def _table(plan: Plan, count: int, width: int) -> str:
    if mixed.is_mixed(plan.config):
        return mixed.stages_section(plan, width) + mixed.alone_section(plan, width)
    if plan.far_apart is not None:
        return far_apart_answer(plan, width)
    rows = candidates.top_rows(plan)[:count]
    return rendered_rows(rows, TOP_COLUMNS, Format.TABLE, width=width)


def _memory_bars(plan: Plan) -> list[str]:
    """Components of the fullest stage against the memory of the device, GiB."""
    limit = plan.memory["limit_bytes"]
    worst = plan.memory["worst"]
    parts = [
        (key.removesuffix("_bytes").replace("_", " "), value)
        for key, value in worst.items()
        if key.endswith("_bytes") and key not in figures.NOT_COMPONENTS and value
    ]
    parts.sort(key=lambda part: -part[1])
    lines = [f"Memory, GiB of {gib(limit)}"]
    lines += [bar_line(name, gib(value), value / limit) for name, value in parts[: MOST_BARS - 1]]
    return [*lines, bar_line("at most, safe", gib(worst["safe_bytes"]), worst["safe_bytes"] / limit)]


def _why_not(plan: Plan, width: int) -> str:
    """The well-known other choices and what they cost, in one paragraph: time, unless something else is minimised."""
    rows = [row for row in candidates.alternative_rows(plan) if row.get("slower_by") is not None]
    costs = [f"{row['name']} {signed_percent(row.get('dearer_by', row['slower_by']))}" for row in rows]
    unit = candidates.cost_title(plan)
    return paragraph(f"Why not{f', {unit}' if unit else ''}: {', '.join(costs)}.", width) if costs else ""
