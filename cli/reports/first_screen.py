"""The first screen of an answer: one sentence, the best plans, memory and time as bars, what comes next.

At most :data:`MOST_LINES` lines at 80 columns; the whole report is printed by ``--full`` and ``meshplan plans show``.
``--format markdown`` prints the same as Markdown, for a ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import ModuleType

from meshplan.catalogs.units import format_bytes, format_duration, format_usd
from meshplan.cli.render import TABLE_WIDTH, Column, Format, Row, rendered_rows
from meshplan.cli.reports import mixed, training
from meshplan.cli.reports.configuration import TOP_COLUMNS, config_text
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import bar, gib, interval_text, metric_text, metric_title, percent, signed_percent
from meshplan.cli.reports.serving import advice, certainty
from meshplan.cli.reports.serving import plan as serving
from meshplan.cli.reports.serving.advice import images_text, speculation_text
from meshplan.cli.reports.whole_run.far_apart import devices_text, far_apart_answer, far_apart_sentence
from meshplan.cli.reports.whole_run.forecast import run_sentence
from meshplan.cli.reports.whole_run.lengths import lengths_sentence
from meshplan.planner.core.plan import Plan

MOST_LINES = 40
# Lines that `meshplan plan` prints below: the plan's id and the commands that come next.
_FOOTER_LINES = 6
_MOST_PLANS = 5
_MOST_BARS = 6
_LEAST_SHARE = 0.01
# Columns of half a screen, and of the bar in it.
_HALF, _BAR = 39, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How plans of one kind are summed up.

    Args:
        report: the kind's report module.
        answer: the plan and what it will take, in a sentence or two.
        screen: the first screen for a plan and a width.
    """

    report: ModuleType
    answer: Callable[[Plan], str]
    screen: Callable[[Plan, int], str]


def first_screen(plan: Plan, *, width: int = TABLE_WIDTH) -> str | None:
    """The first screen; None for kinds whose whole report is short, and where no plan was found."""
    summary = _SUMMARIES.get(plan.kind)
    return summary.screen(plan, width) if summary is not None and plan.config else None


def ticket(plan: Plan) -> str | None:
    """The answer in Markdown, to paste into a ticket; None where :func:`first_screen` has nothing either."""
    summary = _SUMMARIES.get(plan.kind)
    if summary is None or not plan.config:
        return None
    report = summary.report
    metrics = [
        {
            "metric": metric_title(name),
            "expected": metric_text(name, interval.value),
            "between": interval_text(name, {"low": interval.low, "high": interval.high}),
        }
        for name, interval in plan.predicted.items()
    ]
    columns = tuple(Column(key=key, title=key.capitalize()) for key in ("metric", "expected", "between"))
    sections = [
        f"### {report.question_text(plan.spec)}\n",
        f"{summary.answer(plan)}\n",
        f"{report.status_text(plan)}\n",
        rendered_rows(report.top_rows(plan), report.TOP_COLUMNS, Format.MARKDOWN),
        rendered_rows(metrics, columns, Format.MARKDOWN),
        f"Plan `{plan.plan_id}`: `meshplan plans show {plan.plan_id}`\n",
    ]
    return "\n".join(sections)


# --- training -------------------------------------------------------------------------------------------------------


def _training(plan: Plan, width: int) -> str:
    head = [
        training.headline(plan, width),
        paragraph(_training_answer(plan), width),
    ]
    tail = [
        _bars(plan),
        _why_not(plan, width),
        training.calibration_text(plan, width),
    ]
    mapping = training.mapping_section(plan, width)
    return _fitted([*head, mapping], lambda count: _training_table(plan, count, width), tail)


def _bars(plan: Plan) -> str:
    """Memory and time side by side; the table of ways over sites takes their place."""
    if plan.far_apart is not None:
        return ""
    return _side_by_side(_memory_bars(plan), _time_bars(plan.breakdown, "Where the step's time goes"))


def _training_answer(plan: Plan) -> str:
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


def _training_table(plan: Plan, count: int, width: int) -> str:
    if mixed.is_mixed(plan.config):
        return mixed.stages_section(plan, width) + mixed.alone_section(plan, width)
    if plan.far_apart is not None:
        return far_apart_answer(plan, width)
    rows = training.top_rows(plan)[:count]
    return rendered_rows(rows, TOP_COLUMNS, Format.TABLE, width=width)


def _memory_bars(plan: Plan) -> list[str]:
    """Components of the fullest stage against the memory of the device, GiB."""
    limit = plan.memory["limit_bytes"]
    worst = plan.memory["worst"]
    parts = [
        (key.removesuffix("_bytes").replace("_", " "), value)
        for key, value in worst.items()
        if key.endswith("_bytes") and key not in training.NOT_COMPONENTS and value
    ]
    parts.sort(key=lambda part: -part[1])
    lines = [f"Memory, GiB of {gib(limit)}"]
    lines += [_bar_line(name, gib(value), value / limit) for name, value in parts[: _MOST_BARS - 1]]
    return [*lines, _bar_line("at most, safe", gib(worst["safe_bytes"]), worst["safe_bytes"] / limit)]


def _why_not(plan: Plan, width: int) -> str:
    """The well-known other choices and what they cost, in one paragraph: time, unless something else is minimised."""
    rows = [row for row in training.alternative_rows(plan) if row.get("slower_by") is not None]
    costs = [f"{row['name']} {signed_percent(row.get('dearer_by', row['slower_by']))}" for row in rows]
    unit = training.cost_title(plan)
    return paragraph(f"Why not{f', {unit}' if unit else ''}: {', '.join(costs)}.", width) if costs else ""


# --- serving --------------------------------------------------------------------------------------------------------


def _serving(plan: Plan, width: int) -> str:
    head = [serving.headline(plan, width), paragraph(_serving_answer(plan), width)]
    tail = [
        _side_by_side(_pool_bars(plan), _time_bars(plan.breakdown, "Where an iteration's time goes")),
        _kept(plan, width),
        images_text(plan, width),
        speculation_text(plan, width),
        certainty.calibration_text(plan, width),
    ]
    return _fitted(head, lambda count: _serving_table(plan, count, width), tail)


def _serving_answer(plan: Plan) -> str:
    """The deployment, its latencies against their SLOs, and what it costs."""
    pools = " ".join(serving.pool_text(pool) for pool in plan.config["pools"])
    slo: Mapping[str, float] = plan.spec.get("slo", {})
    means = ("ttft_mean_s", "tpot_mean_s") if "ttft_mean_s" in plan.predicted else ("e2e_mean_s",)
    shown = [key for key in plan.predicted if key in slo] or [key for key in means if key in plan.predicted]
    latencies = ", ".join(_latency(plan, key, slo) for key in shown)
    text = f"Answer: {pools} Predicted: {latencies}"
    dollars = plan.predicted.get("usd_per_million_tokens")
    if dollars is not None:
        text += f"; {format_usd(dollars.value)} for {serving.million_text(plan)}"
    return f"{text}."


def _latency(plan: Plan, key: str, slo: Mapping[str, float]) -> str:
    interval = plan.predicted[key]
    name, _, percentile = key.removesuffix("_s").partition("_")
    between = interval_text(key, {"low": interval.low, "high": interval.high})
    limit = f", SLO {metric_text(key, slo[key])}" if key in slo else ""
    return f"{name.upper()} {percentile} {metric_text(key, interval.value)} ({between}{limit})"


def _serving_table(plan: Plan, count: int, width: int) -> str:
    return rendered_rows(serving.top_rows(plan)[:count], serving.top_columns(plan), Format.TABLE, width=width)


def _pool_bars(plan: Plan) -> list[str]:
    """Memory of a device of each pool, GiB, and the tokens that its KV cache holds."""
    lines = []
    pools: Sequence[Row] = plan.memory["pools"]
    for pool in pools:
        device = pool["device_memory_bytes"]
        role = "" if len(pools) == 1 else f", {pool.get('pool', pool['role'])}"
        lines.append(f"Memory{role}, GiB of {gib(device)}")
        lines += [
            _bar_line(name, gib(pool[key]), pool[key] / device)
            for name, key in (("weights", "weights_bytes"), ("KV cache", "kv_cache_bytes"), ("rest", "workspace_bytes"))
        ]
        held = f"room for {pool['kv_capacity_tokens']:,} tokens"
        lines.append(held if pool["kv_bytes_per_token"] else "no KV cache is kept")
    return lines


def _kept(plan: Plan, width: int) -> str:
    """How sure the SLOs are, and how much more the deployment bears."""
    words = " ".join(text for text in (certainty.kept_text(plan), advice.most_rate_text(plan)) if text)
    return paragraph(words, width) if words else ""


_SUMMARIES: Mapping[str, Summary] = {
    "training": Summary(report=training, answer=_training_answer, screen=_training),
    "serving": Summary(report=serving, answer=_serving_answer, screen=_serving),
}


# --- both -----------------------------------------------------------------------------------------------------------


def _time_bars(breakdown: Sequence[Row], title: str) -> list[str]:
    """The largest parts of a step or an iteration."""
    rows = [row for row in breakdown if row["share"] >= _LEAST_SHARE][:_MOST_BARS]
    largest = max((row["share"] for row in rows), default=1.0)
    return [title, *(_bar_line(str(row["name"]), percent(row["share"]), row["share"] / largest) for row in rows)]


def _bar_line(name: str, value: str, share: float) -> str:
    """Name, value and bar within half a screen; a longer name is cut."""
    room = _HALF - _BAR - 9
    shown = name if len(name) <= room else f"{name[: room - 1]}…"
    return f"{shown:<{room}} {value:>6}  {bar(share, _BAR)}"


def _side_by_side(left: Sequence[str], right: Sequence[str]) -> str:
    return "".join(f"{one:<{_HALF}}  {two}".rstrip() + "\n" for one, two in zip_longest(left, right, fillvalue=""))


def _fitted(head: Sequence[str], table: Callable[[int], str], tail: Sequence[str]) -> str:
    """The sections with as many plans in the table as fit the screen, at least one."""
    count = _MOST_PLANS
    while True:
        text = "\n".join(section for section in (*head, table(count), *tail) if section)
        if count == 1 or text.count("\n") + _FOOTER_LINES <= MOST_LINES:
            return text
        count -= 1
