"""A serving plan on its page: the workers, the latencies beside their limits, the front of speed and throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration, format_usd
from meshplan.cli.render import Column
from meshplan.cli.reports.quantities import LATENCY_TITLES, metric_text, metric_title
from meshplan.cli.reports.serving import advice, certainty
from meshplan.cli.reports.serving import plan as report
from meshplan.cli.reports.serving.headline import question_text
from meshplan.cli.web.pages.views import charts
from meshplan.cli.web.pages.views.tables import table
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

_SHORT = {
    "tensor_parallel": "TP",
    "pipeline_parallel": "PP",
    "attention_data_parallel": "DP",
    "expert_parallel": "EP",
    "context_parallel": "CP",
}
_ROLES = {"mixed": "replica", "prefill": "prefill worker", "decode": "decode worker"}
_DEGREES = (1, 2, 4, 8)
# Curves of the simulation: name in the plan's series → what it is called.
_SERIES = {"decoding": "being answered", "prefilling": "in prefill", "queued": "waiting"}
_PERCENTILE = {"p50": "half", "p90": "90 %", "p95": "95 %", "p99": "99 %"}


def question(plan: Plan) -> str:
    """What was asked."""
    return question_text(plan.spec)


def sections(plan: Plan) -> dict[str, Any]:
    """The parts of the page that are a serving plan's own."""
    return {
        "title": f"Serve {plan.spec.get('model')}",
        "equation": equation(plan.config),
        "sentences": list(sentences(plan)),
        "candidates": candidates(plan),
        "memory": memory(plan),
        "pareto": pareto(plan),
        "series": series(plan),
        "tables": sensitivity(plan),
        "notes": [line for line in _notes(plan).splitlines() if line],
        "other_choices": other_choices(plan),
    }


def equation(config: Mapping[str, Any]) -> str:
    """The devices as a sum of products: ``40 GPUs = 5 replicas × TP8``."""
    terms = []
    for pool in config["pools"]:
        degrees = "·".join(
            f"{short}{pool['layout'].get(key, 1)}" for key, short in _SHORT.items() if pool["layout"].get(key, 1) > 1
        )
        one = "part of a GPU" if _shares_devices(pool) else "one GPU"
        terms.append(f"{counted(int(pool['num_workers']), _ROLES[pool['role']])} × {degrees or one}")
    return f"{counted(int(config['num_devices']), 'GPU')} = {' + '.join(terms)}"


def _shares_devices(pool: Mapping[str, Any]) -> bool:
    """Whether several workers run on one device: instances of MIG, or replicas under MPS."""
    return "mig" in pool or "mps" in pool


def _gpus(pool: Mapping[str, Any]) -> str:
    """The GPUs of each worker, or of all where they share them."""
    if _shares_devices(pool):
        return counted(int(pool["num_devices"]), "GPU")
    each = " each" if pool["num_workers"] > 1 else ""
    return counted(int(pool["num_devices"]) // int(pool["num_workers"]), "GPU") + each


def sentences(plan: Plan) -> Iterator[str]:
    """The answer without jargon: what to run, what users see, what it costs."""
    parts = [
        f"{counted(int(pool['num_workers']), 'copy', 'copies')} of the model"
        f"{'' if pool['role'] == 'mixed' else ' for ' + {'prefill': 'prompts', 'decode': 'answers'}[pool['role']]}"
        f" on {_gpus(pool)}"
        for pool in plan.config["pools"]
    ]
    yield f"Run {' and '.join(parts)}, with {plan.config['engine']}."
    yield from _on_the_host(plan)
    for pool in plan.config["pools"]:
        if (mig := pool.get("mig")) is not None:
            yield f"Every GPU is cut into {mig['instances']} parts ({mig['name']}), with a server in each."
        if (mps := pool.get("mps")) is not None:
            yield f"Every GPU runs {mps['instances']} servers at the same time (CUDA MPS)."
    slo: Mapping[str, float] = plan.spec.get("slo") or {}
    latencies = [_latency(key, plan.predicted[key].value, slo[key]) for key in plan.predicted if key in slo]
    if latencies:
        yield " ".join(latencies)
    dollars = plan.predicted.get("usd_per_million_tokens")
    rate = plan.predicted["requests_per_s"].value
    cost = "" if dollars is None else f" at {format_usd(dollars.value)} for {report.million_text(plan)}"
    yield f"It answers {rate:.3g} requests a second{cost}."
    kept = " ".join(text for text in (certainty.kept_text(plan), advice.bears_text(plan)) if text)
    if kept:
        yield kept


def _on_the_host(plan: Plan) -> Iterator[str]:
    """Of a model that is larger than its GPUs: what lies in host memory, and who computes with it."""
    for pool in plan.config["pools"]:
        tiers = pool.get("weight_tiers")
        if tiers is None:
            continue
        size = f"{format_bytes(tiers['host_bytes'])} of the weights"
        if tiers["way"] == "streamed":
            yield f"The model is larger than its GPUs: {size} stay in host memory and are read each time."
        elif tiers["way"] == "layers_on_host":
            layers = counted(int(tiers["host_layers"]), "layer")
            yield (
                f"The model is larger than its GPUs: {size}, of {layers}, stay in host memory, where the processor "
                "computes them in turn with the GPUs."
            )
        else:
            kept = counted(int(tiers["device_experts"]), "expert")
            yield (
                f"The model is larger than its GPUs: {kept} of each layer lie on them, the others, {size}, "
                "in host memory, where the processor computes them."
            )


def _latency(key: str, value: float, limit: float) -> str:
    name, _, percentile = key.removesuffix("_s").partition("_")
    who = f" for {_PERCENTILE[percentile]} of the requests" if percentile in _PERCENTILE else " on average"
    title, limited = LATENCY_TITLES.get(name, name), f"the limit is {format_duration(limit)}"
    verdict = "" if value <= limit else ", which is too long"
    return f"The {title} is at most {format_duration(value)}{who}{verdict}; {limited}."


def _column(latency: str) -> str:
    """A latency as a column's heading; of a mean its name alone."""
    metric, percentile, _ = latency.split("_")
    title = {"ttft": "first token", "tpot": "per token"}[metric]
    return title if percentile == "mean" else f"{title}, {percentile}"


def candidates(plan: Plan) -> dict[str, Any]:
    """The simulated deployments, the chosen one first, each with why it is not the one."""
    first, following = report.shown_latencies(plan)
    rows = [
        {
            "chosen": bool(row["chosen"]),
            "name": str(row["label"]),
            "detail": "",
            "cells": [
                f"{row['num_devices']:,}",
                format_duration(figures[first]),
                format_duration(figures[following]),
                f"{row['requests_per_s']:.3g}",
                "–" if row.get("usd_per_hour") is None else format_usd(row["usd_per_hour"]),
            ],
            "reason": str(row["reason"]),
            "instead": [] if row["chosen"] else _pins(row.get("config") or {}),
        }
        for row, figures in zip(plan.alternatives, report.top_rows(plan), strict=True)
    ]
    return {
        "columns": ["GPUs", _column(first), _column(following), "requests/s", "an hour"],
        "rows": rows,
        "caption": "Deployments that were simulated: the chosen one first",
    }


def _pins(config: Mapping[str, Any]) -> list[str]:
    """Choices that bring a deployment of one kind of workers back; none where its workers differ."""
    pools: Sequence[Mapping[str, Any]] = config.get("pools", ())
    if len(pools) != 1:
        return []
    pool = pools[0]
    degrees = [f"{key}={pool['layout'].get(key, 1)}" for key in ("tensor_parallel", "pipeline_parallel")]
    return [*degrees, f"num_workers={pool['num_workers']}"]


def memory(plan: Plan) -> list[dict[str, Any]]:
    """One stacked bar for a device of every pool."""
    bars = []
    for pool in plan.memory["pools"]:
        device = pool["device_memory_bytes"]
        parts = [
            (name, float(pool[key]), format_bytes(pool[key]))
            for name, key in (
                ("weights", "weights_bytes"),
                ("KV cache", "kv_cache_bytes"),
                ("workspace", "workspace_bytes"),
            )
        ]
        used = pool["weights_bytes"] + pool["kv_cache_bytes"] + pool["workspace_bytes"]
        bars.append(
            {
                "name": f"{str(pool.get('pool', pool['role'])).capitalize()} worker, one {pool['device']}",
                "parts": charts.stacked(parts, device),
                "typical_at": None,
                "safe_at": charts.share(used, device),
                "limit_at": charts.share(pool["budget_bytes"], device),
                "words": f"{format_bytes(used)} of {format_bytes(pool['budget_bytes'])} that the engine may take; "
                f"room for {pool['kv_capacity_tokens']:,} tokens",
            }
        )
    return bars


def pareto(plan: Plan) -> dict[str, Any] | None:
    """Speed of one user against throughput of one device, with the line that an SLO draws and the plan itself."""
    rows: Sequence[Mapping[str, Any]] = (plan.answer or {}).get("pareto", ())
    if not rows:
        return None
    tpot = plan.predicted.get("tpot_mean_s")
    own = []
    if tpot is not None and tpot.value > 0:
        own = [(1.0 / tpot.value, plan.predicted["output_tokens_per_s_per_device"].value)]
    places = [(row["tokens_per_s_per_user"], row["tokens_per_s_per_device"]) for row in rows]
    chart = charts.scatter([*places, *own])
    limits = [
        {"at": charts.share(1.0 / limit, chart["most_x"]), "text": f"{metric_title(key)} ≤ {metric_text(key, limit)}"}
        for key, limit in (plan.spec.get("slo") or {}).items()
        if key.startswith("tpot") and limit > 0
    ]
    front = [
        {
            **place,
            "label": str(row["label"]),
            "node_type": str(row["node_type"]),
            "weights": str(row["quantization"]),
            "running": f"{row['num_running']:,}",
            "user": f"{row['tokens_per_s_per_user']:,.1f}",
            "device": f"{row['tokens_per_s_per_device']:,.0f}",
            "is_met": bool(row["keeps_promises"]),
            "instead": _layout_pins(str(row["label"])),
        }
        for place, row in zip(chart["points"], rows, strict=False)
    ]
    return {**chart, "points": front, "own": chart["points"][len(rows) :], "limits": limits}


def _layout_pins(label: str) -> list[str]:
    """Choices that bring a worker of the front back: its degrees, from its label.

    >>> _layout_pins("TP4 PP2"), _layout_pins("1 × TP2 → 1 × TP4")
    (['tensor_parallel=4', 'pipeline_parallel=2'], [])
    """
    names = {short: key for key, short in _SHORT.items()}
    parts = label.split(",", maxsplit=1)[0].split()
    degrees = [(part.rstrip("0123456789"), part[len(part.rstrip("0123456789")) :]) for part in parts]
    if not all(short in names and number for short, number in degrees):
        return []
    return [f"{names[short]}={number}" for short, number in degrees]


def series(plan: Plan) -> dict[str, Any] | None:
    """Requests in each state over the simulated time, and how full the KV cache is."""
    series: Mapping[str, Sequence[float]] = (plan.answer or {}).get("series") or {}
    if not series or not series.get("end_s"):
        return None
    most = max(max(series[name], default=0.0) for name in _SERIES) or 1.0
    curves = [
        {"name": words, "points": charts.curve(series["end_s"], series[name], most)} for name, words in _SERIES.items()
    ]
    full = charts.curve(series["end_s"], series["kv_use"], 1.0)
    return {
        "curves": [*curves, {"name": "KV cache, of all of it", "points": full}],
        "y_ticks": [{"at": 100 - charts.share(tick, most), "text": f"{tick:,.4g}"} for tick in charts.ticks(most)],
        "x_ticks": [
            {"at": charts.share(tick, series["end_s"][-1]), "text": f"{tick:,.4g} s"}
            for tick in charts.ticks(series["end_s"][-1])
        ],
    }


def sensitivity(plan: Plan) -> list[dict[str, Any]]:
    """The same deployment under other requests."""
    rows = (plan.answer or {}).get("sensitivity") or ()
    columns = (
        Column(key="change", title="What if …"),
        Column(key="ttft_p99_s", title="first token, p99", right=True, text=format_duration),
        Column(key="tpot_mean_s", title="per token", right=True, text=format_duration),
        Column(key="broken", title="breaks", derive=lambda row: ", ".join(row["broken"]) or "nothing"),
    )
    return [table(rows, columns, caption="The same deployment under other requests")] if rows else []


def _notes(plan: Plan) -> str:
    parts = (certainty.calibration_text, certainty.sampling_text, certainty.power_text)
    return "".join(part(plan, 10_000) for part in parts)


def other_choices(plan: Plan) -> list[dict[str, str]]:
    """Tensor-parallel degrees to compare with, where all workers are alike."""
    pools = plan.config["pools"]
    own = {int(pool["layout"]["tensor_parallel"]) for pool in pools}
    most = len(plan.rank_table or ()) or int(plan.config["num_devices"])
    return [
        {"label": f"TP{degree}", "instead": f"tensor_parallel={degree}"}
        for degree in _DEGREES
        if degree not in own and degree <= most and len(pools) == 1
    ]
