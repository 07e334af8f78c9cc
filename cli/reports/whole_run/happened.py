"""A run so far beside its forecast, and what follows for the rest of it."""

from __future__ import annotations

import math

from meshplan.catalogs.units import SECONDS_PER_DAY, format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import percent
from meshplan.planner.core.plan import Plan
from meshplan.planner.goodput.conditions import FailureRate
from meshplan.planner.goodput.run_log import RunLog, gamma_quantile, updated_rate

_COLUMNS = (
    Column(key="what", title="The run so far"),
    Column(key="forecast", title="Forecast"),
    Column(key="between", title="between"),
    Column(key="actual", title="Actual"),
)


def happened_text(plan: Plan, log: RunLog, *, width: int) -> str:
    """Forecast against actual as a table, the rest of the run, and the words that the next plan is asked with.

    Args:
        plan: with a run.
        log: of that run.
        width: of the terminal.
    """
    run = plan.run
    if run is None:
        raise AssertionError("only a plan with a run is compared with a log")
    stated = run["failures_per_node_day"]
    before = FailureRate(per_node_day=stated["value"], low=stated["low"], high=stated["high"], source=stated["source"])
    after = updated_rate(before, log.interruptions, log.node_days)
    low, high = (_poisson_end(rate * log.node_days, share) for rate, share in ((before.low, 0.05), (before.high, 0.95)))
    ratio, rate = plan.predicted["effective_training_time_ratio"], plan.predicted["tokens_per_s"]
    rows: list[Row] = [
        {
            "what": "interruptions",
            "forecast": f"{before.per_node_day * log.node_days:,.1f}",
            "between": f"{low:,.1f} … {high:,.1f}",
            "actual": f"{log.interruptions:,}",
        },
        {
            "what": "to start again",
            "forecast": format_duration(run["restart_s"]),
            "between": "",
            "actual": "" if log.restart_s is None else format_duration(log.restart_s),
        },
        {
            "what": "share of the time that trains",
            "forecast": percent(ratio.value),
            "between": f"{percent(ratio.low)} … {percent(ratio.high)}",
            "actual": percent(log.ratio),
        },
        {
            "what": "tokens/s while it trains",
            "forecast": f"{rate.value:,.0f}",
            "between": f"{rate.low:,.0f} … {rate.high:,.0f}",
            "actual": f"{log.tokens_per_s:,.0f}",
        },
    ]
    compared = rendered_rows(rows, _COLUMNS, Format.TABLE, width=width)
    return compared + paragraph(_rest(plan, log), width) + paragraph(_next(after, log), width)


def _poisson_end(mean: float, share: float) -> float:
    """End of the interval of a count with this mean, as a Gamma distribution of the same shape."""
    return 0.0 if mean <= 0.0 else gamma_quantile(max(mean, 0.5), share)


def _rest(plan: Plan, log: RunLog) -> str:
    """What is left, as fast as the run went until now."""
    if plan.run is None or log.ratio <= 0.0:
        return ""
    total = plan.run["training_s"] * plan.predicted["tokens_per_s"].value
    left_s = max(0.0, total - log.tokens) / (log.tokens_per_s * log.ratio)
    whole = log.wall_s + left_s
    forecast = plan.predicted["run_time_s"]
    left, ends, low, high = (
        f"{seconds / SECONDS_PER_DAY:,.1f}" for seconds in (left_s, whole, forecast.low, forecast.high)
    )
    return f"At this pace the run ends {left} d from now, {ends} d after its start; forecast were {low} to {high} d."


def _next(after: FailureRate, log: RunLog) -> str:
    """How the next plan learns from it."""
    words = f"--set run.counted.interruptions={log.interruptions} --set run.counted.node_days={log.node_days:.6g}"
    if log.restart_s is not None:
        words += f" --set run.restart_time='{math.ceil(log.restart_s)} s'"
    return (
        f"Believed now: {1e3 * after.per_node_day:.2g} interruptions per 1,000 node-days ({1e3 * after.low:.2g} to "
        f"{1e3 * after.high:.2g}). The next plan takes it from: {words}"
    )
