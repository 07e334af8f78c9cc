"""What a training plan will take: its predicted metrics and what they rest on, memory by stage, time by part."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.catalogs.units import format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import METRIC_TITLES, bar, gib, interval_text, metric_text, metric_title, percent
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.training.explanation import calibration, memory_basis, width_text

_RANK_COLUMN = "first_stage"
_VISIBLY_WIDER = 0.01  # of a half-width: what rounding to a percent hides
NOT_COMPONENTS = {"typical_bytes", "safe_bytes"}
_COMPONENT_TITLES = {"host": "on host", "optimizer": "optim.", "activations": "activ.", "gradients": "grads"}


def predicted_section(plan: Plan, width: int) -> str:
    """Every predicted metric with its interval."""
    order = {name: place for place, name in enumerate(METRIC_TITLES)}
    names = sorted(plan.predicted, key=lambda name: (order.get(name, len(order)), name))
    rows: list[Row] = []
    for name in names:
        interval = plan.predicted[name]
        ends = {"low": interval.low, "high": interval.high}
        rows.append(
            {
                "metric": metric_title(name),
                "expected": metric_text(name, interval.value),
                "between": interval_text(name, ends),
            }
        )
    columns = (
        Column(key="metric", title="Predicted", wrap=False),
        Column(key="expected", title="expected", right=True, wrap=False),
        Column(key="between", title="between"),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width) + calibration_text(plan, width)


def calibration_text(plan: Plan, width: int) -> str:
    """The measured runs from which the intervals come."""
    basis = calibration(plan)
    if not basis:
        return ""
    bound = memory_basis(plan)
    held = paragraph(f"Safe memory: {bound}.", width) if bound else ""
    unvalidated = plan.provenance.get("not_validated", ())
    doubts = "".join(paragraph(f"Not validated: {what}.", width) for what in unvalidated)
    return paragraph(f"Intervals: {basis}{_wider(plan)}.", width) + held + doubts


def _wider(plan: Plan) -> str:
    """How far the step's interval reaches where what is not validated widens it visibly."""
    step = plan.predicted["iteration_s"]
    spread = step.high / step.value - 1.0
    if spread < plan.provenance["calibration"]["time_error_p90"] + _VISIBLY_WIDER:
        return ""
    return f"; here {width_text(spread)}, for what is not validated"


def memory_section(plan: Plan, width: int) -> str:
    """Memory of a rank of every distinct stage, by component."""
    memory = plan.memory
    stages: Sequence[Row] = memory["stages"]
    limit = memory["limit_bytes"]
    worst = memory["worst"][_RANK_COLUMN]
    components = list(
        dict.fromkeys(
            key
            for stage in stages
            for key, value in stage.items()
            if key.endswith("_bytes") and key not in NOT_COMPONENTS and value
        )
    )

    def stage_text(stage: Row) -> str:
        alike = f" (×{stage['num_stages']})" if stage["num_stages"] > 1 else ""
        mark = " ◀" if stage[_RANK_COLUMN] == worst else ""
        return f"{stage[_RANK_COLUMN]}{alike}{mark}"

    columns = (
        Column(key=_RANK_COLUMN, title="stage", derive=stage_text, wrap=False),
        Column(key="num_layers", title="layers", right=True),
        *(Column(key=key, title=_component_title(key), right=True, text=gib, wrap=False) for key in components),
        Column(key="typical_bytes", title="typical", right=True, text=gib, wrap=False),
        Column(key="safe_bytes", title="safe", right=True, text=gib, wrap=False),
    )
    title = f"Memory of one rank in GiB; the limit for 'safe' is {gib(limit)} (◀ the worst stage)"
    text = rendered_rows(stages, columns, Format.TABLE, title=title, width=width)
    if any(stage["num_stages"] > 1 for stage in stages):
        text += paragraph("×: stages with equal layers; the first is shown, which holds the most micro-batches.", width)
    return text


def _component_title(key: str) -> str:
    name = key.removesuffix("_bytes")
    return _COMPONENT_TITLES.get(name, name.replace("_", " "))


def time_section(plan: Plan, width: int) -> str:
    """Where the step's time goes; parts below a tenth of a percent are summed."""
    least = 0.001
    shown = [row for row in plan.breakdown if row["share"] >= least]
    small = [row for row in plan.breakdown if row["share"] < least]
    rows: list[Row] = [*shown]
    if small:
        seconds, share = (sum(row[key] for row in small) for key in ("seconds", "share"))
        rows.append({"name": counted(len(small), "smaller part"), "seconds": seconds, "share": share, "evidence": ""})
    largest = max((row["share"] for row in rows), default=1.0)
    columns = (
        Column(key="name", title="Where the step's time goes"),
        Column(key="seconds", title="time", right=True, text=format_duration, wrap=False),
        Column(key="share", title="share", right=True, text=percent, wrap=False),
        Column(key="share", title="", derive=lambda row: bar(row["share"] / largest) or " ", wrap=False),
        Column(key="evidence", title="rests on", derive=_evidence, wrap=False),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width)


def _evidence(row: Row) -> str:
    """The level of evidence, shortened; the JSON has the full text."""
    return str(row["evidence"]).split(" to ")[0]
