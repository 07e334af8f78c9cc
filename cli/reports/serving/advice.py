"""What a serving plan answers beyond itself, as a person reads it: other requests, the Pareto front, other shapes.

The answers are made in :mod:`meshplan.planner.serving.advice`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_bandwidth, format_bytes, format_duration, format_usd
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import bar, percent, rate_text
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.serving.estimator.host.front_end import AT_ONCE, MORE_API_SERVERS
from meshplan.planner.serving.problem.engines.table import ENGINES

LOADS_SHOWN = 4
# Where prefixes are kept that the devices have no room for.
LEAST_SPEEDUP = 1.02  # less is not worth a sentence
LEAST_WAIT = 0.05
NEAR_PASSED = 0.9  # of the rate that API servers let pass, from which on they decide
API_SERVER = "API server"  # the part of an iteration that planner.serving.estimator.breakdown calls so
STORES = {"host": "host memory", "nvme": "NVMe", "remote": "the hosts' memory, shared by the workers of a pool"}
_METHODS = {"ngram": "n-grams", "eagle3": "EAGLE-3", "mtp": "prediction layers", "draft_model": "a draft model"}


def most_rate_text(plan: Plan) -> str:
    """The rate that the deployment bears with room to spare, where a rate was given."""
    most = (plan.answer or {}).get("max_request_rate_per_s")
    if most == 0.0:
        return "At no rate that was tried does this deployment stay clearly within every SLO."
    return "" if most is None else f"This deployment stays clearly within every SLO up to {rate_text(most)}."


def prefixes_text(plan: Plan) -> str:
    """How much of prompts is found in caches, where requests say what they share."""
    shares = (plan.answer or {}).get("prefixes")
    if not shares:
        return ""
    return f"Caches hold {percent(shares['found'])} of the prompts' tokens, at most {percent(shares['most'])} could be."


def bears_text(plan: Plan) -> str:
    """What the deployment bears beyond its load, and what its caches find."""
    return " ".join(text for text in (most_rate_text(plan), prefixes_text(plan)) if text)


def front_end_text(plan: Plan, width: int) -> str:
    """That API servers decide the rate, and what lets them do less; empty where they hardly do."""
    passed = (plan.answer or {}).get("most_passed_on_per_s")
    waits = max((row["share"] for row in plan.breakdown if row["name"] == API_SERVER), default=0.0)
    lines = []
    if passed is not None and plan.predicted["requests_per_s"].value > NEAR_PASSED * passed:
        lines.append(f"Its API servers let {passed:.3g} requests/s pass, however fast the GPUs are.")
    if waits >= LEAST_WAIT:
        lines.append(f"An iteration waits {percent(waits)} of its time for the API server.")
    return paragraph(" ".join([*lines, _relief(plan)]), width) if lines else ""


def _relief(plan: Plan) -> str:
    """What lets API servers pass more."""
    pools, words = plan.config["pools"], []
    if ENGINES[plan.config["engine"]].scales_api_servers and not any(one["limits"].get("api_servers") for one in pools):
        words.append(f"more of them (--set fixed.api_servers={MORE_API_SERVERS}, a processor core each)")
    if all(one["limits"].get("stream_interval", 1) == 1 for one in pools):
        words.append(f"several tokens sent to a client at once (--set fixed.stream_interval={AT_ONCE})")
    return f"More pass with {'; '.join([*words, 'more workers'])}."


def sensitivity_section(plan: Plan, width: int) -> str:
    """The chosen deployment under other requests, and the most that it takes."""
    answer = plan.answer or {}
    rows: Sequence[Row] = answer.get("sensitivity", ())
    if not rows:
        return ""
    columns = (
        Column(key="change", title="What if …?"),
        Column(key="ttft_p99_s", title="TTFT p99", right=True, text=format_duration, wrap=False),
        Column(key="tpot_mean_s", title="TPOT", right=True, text=format_duration, wrap=False),
        Column(key="broken", title="violates", derive=lambda row: ", ".join(row["broken"]) or "nothing"),
    )
    text = rendered_rows(rows, columns, Format.TABLE, width=width)
    bears = bears_text(plan)
    return text + paragraph(bears, width) if bears else text


# --- Pareto front -----------------------------------------------------------------------------------------------------


def pareto_section(plan: Plan, width: int) -> str:
    """Speed of one user against throughput of one device, as a table with bars; and the useful batch."""
    answer = plan.answer or {}
    rows: Sequence[Row] = answer.get("pareto", ())
    if not rows:
        return ""
    most = max(row["tokens_per_s_per_device"] for row in rows)
    columns = (
        Column(key="keeps_promises", title="", text=lambda is_met: "·" if is_met else " ", wrap=False),
        Column(key="tokens_per_s_per_user", title="tok/s/user", right=True, text=_whole, wrap=False),
        Column(key="tokens_per_s_per_device", title="tok/s/dev", right=True, text=_whole, wrap=False),
        Column(
            key="tokens_per_s_per_device",
            title="",
            derive=lambda row: bar(row["tokens_per_s_per_device"] / most) or " ",
            wrap=False,
        ),
        Column(key="num_running", title="running", right=True, wrap=False),
        Column(key="label", title="worker", wrap=False),
        Column(key="quantization", title="weights"),
    )
    title = "Speed of one user against throughput of one device (· meets the SLOs), closed form"
    text = rendered_rows(rows, columns, Format.TABLE, title=title, width=width)
    useful = answer.get("useful_batch")
    if useful is not None:
        text += paragraph(
            f"Beyond {counted(useful, 'running request')} per worker, one more adds less than a tenth of the first.",
            width,
        )
    return text


def _dollars(value: float | None) -> str:
    return "–" if value is None else format_usd(value)


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"  # noqa: PLR2004 - two digits are enough


# --- the bound of the devices -----------------------------------------------------------------------------------------


def overlap_section(plan: Plan, width: int) -> str:
    """What each pool reaches of what its devices could do if all resources overlapped, and what keeps it from that."""
    rows = (plan.answer or {}).get("overlap", ())
    return "".join(paragraph(overlap_text(row, several=len(rows) > 1), width) for row in rows)


def overlap_text(row: Row, *, several: bool) -> str:
    """One pool's bound in words: the share, the resource that binds, and the three factors that make the share."""
    who = f"A {row['pool']} worker" if several else "A worker"
    return (
        f"{who} reaches {percent(row['share'])} of what its devices could do if compute, memory and links overlapped "
        f"wholly ({row['requests_per_s']:.3g} requests/s, bound by {row['resource']}; NanoFlow, arXiv:2408.12757), "
        f"because its batch allows {percent(row['batch_share'])} of that, one resource after the other "
        f"{percent(row['order_share'])}, and kernels below peak rates, host and waiting {percent(row['rest_share'])}."
        + _nano_batches_text(row.get("nano_batches_speedup"))
    )


def _nano_batches_text(speedup: float | None) -> str:
    """What NanoFlow's way of overlapping would bring; empty where it was not asked, as in plans of earlier versions."""
    if speedup is None:
        return ""
    if speedup < LEAST_SPEEDUP:
        return " Two nano-batches that overlap would bring nothing: they would read the weights twice."
    share = percent(1.0 / speedup)
    return f" Two nano-batches that overlap would take {share} of its kernels' time; no engine here runs so."


# --- shapes that no engine runs ---------------------------------------------------------------------------------------


def better_shapes(plan: Plan) -> list[Row]:
    """Shapes whose bound is above what the plan reaches for a device, or for a dollar where that is the objective."""
    rows = (plan.answer or {}).get("what_if", ())
    cost = plan.predicted.get("usd_per_million_tokens")
    if plan.spec.get("objective") == "usd_per_million_tokens" and cost is not None:
        return [row for row in rows if (row.get("usd_per_million_tokens") or math.inf) < cost.value]
    reached = plan.predicted["output_tokens_per_s_per_device"].value
    return [row for row in rows if row["tokens_per_s_per_device"] > reached]


def what_if_section(rows: Sequence[Row], width: int) -> str:
    """Bounds on shapes that no supported engine runs."""
    if not rows:
        return ""
    columns: tuple[Column, ...] = (
        Column(key="name", title="Shape"),
        Column(key="label", title="devices"),
        Column(key="num_running", title="running", right=True, wrap=False),
        Column(key="tpot_s", title="TPOT ≥", right=True, text=format_duration, wrap=False),
        Column(key="tokens_per_s_per_device", title="tok/s/dev ≤", right=True, text=_whole, wrap=False),
    )
    if any(row.get("usd_per_million_tokens") for row in rows):
        columns += (Column(key="usd_per_million_tokens", title="USD/M ≥", right=True, text=_dollars, wrap=False),)
    title = "What if, not validated: no supported engine runs these; decode only, bounds"
    return rendered_rows(rows, columns, Format.TABLE, title=title, width=width)


def shapes_section(plan: Plan, width: int) -> str:
    """The same plan with a second tier for its KV cache."""
    rows = [
        {**row, "flags": "yes" if row["by_engine"] else "none"}
        for row in (plan.answer or {}).get("what_if_simulated", ())
    ]
    if not rows:
        return ""
    columns = (
        Column(key="name", title="Cache"),
        Column(key="label", title="assumed"),
        Column(key="ttft_mean_s", title="TTFT", right=True, text=format_duration, wrap=False),
        Column(key="ttft_p99_s", title="p99", right=True, text=format_duration, wrap=False),
        Column(key="tpot_mean_s", title="TPOT", right=True, text=format_duration, wrap=False),
        Column(key="num_rejected", title="rejected", right=True, wrap=False),
        Column(key="flags", title=f"flags in {plan.config['engine']}", wrap=False),
    )
    title = "What if, not validated: this plan and load with a second tier for the KV cache"
    return rendered_rows(rows, columns, Format.TABLE, title=title, width=width)


def speculation_text(plan: Plan, width: int) -> str:
    """Chosen drafts, the best by load, and the load from which on they hurt; empty where nothing was to choose."""
    by_load = (plan.answer or {}).get("speculation")
    if not by_load:
        return ""
    drafts = plan.config["speculation"]
    chosen = "none is faster" if drafts is None else _named(drafts["method"], drafts["num_draft_tokens"])
    rows = by_load["by_load"]
    shown = [*rows[: -1 : max(len(rows) // LOADS_SHOWN, 1)], rows[-1]]
    each = dict.fromkeys(
        f"{row['num_running']} running: "
        + (
            "none"
            if row["method"] is None
            else f"{_named(row['method'], row['num_draft_tokens'])} ({row['speed_up']:.2f} times)"
        )
        for row in shown
    )
    until = by_load["hurts_from"]
    end = "Drafts help up to the worker's slots." if until is None else f"From {until} running on they hurt."
    text = f"Speculation: {chosen}. Time per token by load of a worker: {'; '.join(each)}. {end}"
    return paragraph(text, width)


def stores_text(plan: Plan, width: int) -> str:
    """Stores for prefixes that the plan might take: sizes, rates, and why not; empty where nothing was to choose."""
    stores = (plan.answer or {}).get("kv_stores")
    if not stores:
        return ""
    chosen = next((row["store"] for row in stores if row["is_chosen"]), None)
    said = "; ".join(_store_text(row) for row in stores)
    start = "none is faster" if chosen is None else STORES[chosen]
    return paragraph(f"Prefixes beyond the devices: {start}; its price is part of the nodes. {said}.", width)


def _store_text(row: Mapping[str, Any]) -> str:
    name = STORES[row["store"]]
    if "bytes_per_device" not in row:
        return f"{name}: {row['reason']}"
    size, needed = format_bytes(row["bytes_per_device"]), row["needed_bytes_per_device"]
    short = f" (99 of 100 prefixes need {format_bytes(needed)})" if needed > row["bytes_per_device"] else ""
    rate, pays = format_bandwidth(row["bytes_per_s_per_device"]), row["break_even_bytes_per_s_per_device"]
    why = f": {row['reason']}" if row["reason"] else ""
    return f"{name}: {size} a device{short} at {rate}, pays above {format_bandwidth(pays)}{why}"


def images_text(plan: Plan, width: int) -> str:
    """What images or sound cost the plan, or that a model that sees was planned for text alone; else empty."""
    images, sound = ((plan.answer or {}).get(name) for name in ("images", "sound"))
    tower = plan.provenance["model"].get("vision")
    if images:
        text = (
            f"Images: each is {images['tokens']:,} tokens of the prompt; the vision encoder takes "
            f"{format_bytes(images['encoder_bytes'])} of each device, and {format_duration(images['encode_s'])} for "
            "those of one request. No run with images was compared."
        )
    elif sound:
        text = (
            f"Sound: each request is a window of {sound['frames']:,} frames; the encoder takes "
            f"{format_bytes(sound['encoder_bytes'])} of each device and {format_duration(sound['encode_s'])} a window, "
            f"what it read {format_bytes(sound['cache_bytes'])} of the device's KV cache until the request ends."
        )
    elif tower:
        text = (
            f"Planned for text alone: the vision encoder ({tower['parameters'] / 1e9:.2f} billion parameters) and the "
            "tokens and time of images are left out; workload.images states them."
        )
    else:
        return ""
    return paragraph(text, width)


def _named(method: str, drafted: int) -> str:
    return f"{_METHODS.get(method, method)}, {drafted} token{'s' if drafted > 1 else ''} drafted"
