"""The first screen of a serving plan: its latencies against their SLOs, memory and time of its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshplan.catalogs.units import format_usd
from meshplan.cli.render import Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import gib, interval_text, latency_name, metric_text
from meshplan.cli.reports.screens.parts import bar_line, fitted, side_by_side, time_bars
from meshplan.cli.reports.serving import advice, certainty
from meshplan.cli.reports.serving import plan as serving
from meshplan.cli.reports.serving.advice import images_text, speculation_text
from meshplan.planner.core.plan import Plan

REPORT = serving


def screen(plan: Plan, width: int) -> str:
    """The first screen of a plan."""
    head = [serving.headline(plan, width), paragraph(answer(plan), width)]
    tail = [
        side_by_side(_pool_bars(plan), time_bars(plan.breakdown, "Where an iteration's time goes")),
        _kept(plan, width),
        images_text(plan, width),
        speculation_text(plan, width),
        advice.front_end_text(plan, width),
        certainty.calibration_text(plan, width),
    ]
    return fitted(head, lambda count: _table(plan, count, width), tail)


def answer(plan: Plan) -> str:
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
    between = interval_text(key, {"low": interval.low, "high": interval.high})
    limit = f", SLO {metric_text(key, slo[key])}" if key in slo else ""
    return f"{latency_name(key)} {metric_text(key, interval.value)} ({between}{limit})"


def _table(plan: Plan, count: int, width: int) -> str:
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
            bar_line(name, gib(pool[key]), pool[key] / device)
            for name, key in (("weights", "weights_bytes"), ("KV cache", "kv_cache_bytes"), ("rest", "workspace_bytes"))
        ]
        held = f"room for {pool['kv_capacity_tokens']:,} tokens"
        lines.append(held if pool["kv_bytes_per_token"] else "no KV cache is kept")
    return lines


def _kept(plan: Plan, width: int) -> str:
    """How sure the SLOs are, and how much more the deployment bears."""
    words = " ".join(text for text in (certainty.kept_text(plan), advice.bears_text(plan)) if text)
    return paragraph(words, width) if words else ""
