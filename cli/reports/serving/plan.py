"""A serving plan as a person reads it, within 80 columns: deployment, latencies and how sure they are, memory, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration, format_usd
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.expert_placement import served_experts_text
from meshplan.cli.reports.no_plan import no_plan_section
from meshplan.cli.reports.parts import (
    model_on_cluster,
    other_degree,
    paragraph,
    rejected_section,
)
from meshplan.cli.reports.quantities import (
    TICK,
    bar,
    gib,
    interval_text,
    latency_name,
    metric_text,
    metric_title,
    percent,
)
from meshplan.cli.reports.serving.advice import (
    STORES,
    better_shapes,
    front_end_text,
    images_text,
    overlap_section,
    pareto_section,
    sensitivity_section,
    shapes_section,
    speculation_text,
    stores_text,
    what_if_section,
)
from meshplan.cli.reports.serving.certainty import calibration_text, power_text, sampling_text
from meshplan.cli.reports.serving.headline import question_text, status_text
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

# How the reason of a runner-up begins that ties with the chosen deployment.
TIED = "a tie"
# Parts of an iteration below this share are left out.
LEAST_SHARE = 0.005
_LATENCIES = ("ttft", "tpot", "itl", "e2e")


def report(plan: Plan, *, width: int) -> str:
    """The complete report; an infeasible plan names the binding constraint and the least change that helps."""
    sections = [headline(plan, width)]
    if not plan.config:
        shapes: Sequence[Row] = plan.solution.get("what_if", ())
        sections += [no_plan_section(plan.solution, width), what_if_section(shapes, width)]
        sections.append(rejected_section(plan, width))
    else:
        sections += [
            top_section(plan, width),
            predicted_section(plan, width),
            memory_section(plan, width),
            time_section(plan, width),
            front_end_text(plan, width),
            overlap_section(plan, width),
            sensitivity_section(plan, width),
            pareto_section(plan, width),
            what_if_section(better_shapes(plan), width),
            shapes_section(plan, width),
            rejected_section(plan, width),
        ]
    return "\n".join(section for section in sections if section)


# --- headline ---------------------------------------------------------------------------------------------------------


def next_commands(plan: Plan, where: str, *, emitted: bool) -> Sequence[str]:
    """Ask about another choice, write the launcher files, attach what was measured."""
    tensor = int(plan.config["pools"][-1]["layout"]["tensor_parallel"])
    devices = int(plan.config["num_devices"]) + int((plan.answer or {}).get("num_idle_devices", 0))
    degree = other_degree(tensor, devices)
    splits = degree is not None and _may_split(plan, degree)
    instead = f" --instead tensor_parallel={degree}" if splits else ""
    commands = [f"meshplan explain {plan.plan_id}{where}{instead}"]
    if not emitted:
        commands.append(f"meshplan emit {plan.plan_id}{where} --out serve")
    return [*commands, f"meshplan plans record {plan.plan_id}{where} --from result.json"]


def _may_split(plan: Plan, degree: int) -> bool:
    """Whether the plan's engine takes so many tensor-parallel devices for its model."""
    # start-up: engines and models are read for the first screen alone
    from meshplan.planner.core.plan import shape_from_document
    from meshplan.planner.serving.problem.engines.table import ENGINES

    engine = ENGINES.get(plan.config["engine"])  # a plan of a service may have one that is not known here
    return engine is not None and engine.may_split(shape_from_document(plan.provenance["model"]), degree)


def headline(plan: Plan, width: int) -> str:
    """The question, the status and the gap."""
    return paragraph(question_text(plan.spec), width) + paragraph(status_text(plan), width)


def million_text(plan: Plan) -> str:
    """What the price is for."""
    pooled = {"embed": "texts", "rerank": "scores"}
    return f"a million {pooled.get(plan.spec['workload'].get('task', ''), 'output tokens')}"


# --- deployments ------------------------------------------------------------------------------------------------------


TOP_COLUMNS = (
    Column(key="chosen", title="", text=lambda chosen: TICK if chosen else " ", wrap=False),
    Column(key="label", title="workers"),
    Column(key="num_devices", title="dev.", right=True, wrap=False),
    Column(key="ttft_p99_s", title="TTFT p99", right=True, text=format_duration, wrap=False),
    Column(key="tpot_mean_s", title="TPOT", right=True, text=format_duration, wrap=False),
    Column(key="requests_per_s", title="req/s", right=True, text=lambda rate: f"{rate:.3g}", wrap=False),
    Column(
        key="output_tokens_per_s_per_device",
        title="tok/s/dev",
        right=True,
        text=lambda rate: f"{rate:,.0f}",
        wrap=False,
    ),
    Column(key="usd_per_hour", title="USD/h", right=True, text=format_usd, wrap=False, optional=True),
    Column(key="reason", title="lost because", optional=True),
)

_SHOWN_LATENCIES = ("ttft_p99_s", "tpot_mean_s")


def shown_latencies(plan: Plan) -> list[str]:
    """Latencies that candidates are told by, each at the percentile that has an SLO: they are read against it."""
    limited = [key for row in plan.alternatives[:1] for key in row.get("slo_latencies", {})]
    return [
        next((key for key in limited if key.startswith(f"{usual.partition('_')[0]}_")), usual)
        for usual in _SHOWN_LATENCIES
    ]


def top_rows(plan: Plan) -> list[Row]:
    """The simulated deployments, the chosen one first, with the latencies that have an SLO among their figures."""
    hidden = ("name", "config", "slo_latencies")
    return [
        {**{key: value for key, value in row.items() if key not in hidden}, **row.get("slo_latencies", {})}
        for row in plan.alternatives
    ]


def describe(spec: Mapping[str, Any]) -> str:
    """The question in short, for lists of plans."""
    return model_on_cluster(spec)


def short_answer(document: Mapping[str, Any]) -> str:
    """Workers and their layouts, for lists of plans."""
    return next((str(row["label"]) for row in document["alternatives"] if row.get("chosen")), "")


def top_columns(plan: Plan) -> Sequence[Column]:
    """Columns of :func:`top_rows`; of vectors and scores nobody waits for a second token."""
    if plan.spec["workload"].get("task", "generate") == "generate":
        asked = dict(zip(_SHOWN_LATENCIES, shown_latencies(plan), strict=True))
        return [
            replace(column, key=key, title=latency_name(key))
            if (key := asked.get(column.key, column.key)) != column.key
            else column
            for column in TOP_COLUMNS
        ]
    titles = {"ttft_p99_s": "p99", "output_tokens_per_s_per_device": "req/s/dev"}
    return [
        replace(column, title=titles.get(column.key, column.title))
        for column in TOP_COLUMNS
        if column.key != "tpot_mean_s"
    ]


def top_section(plan: Plan, width: int) -> str:
    """The table of the best deployments, the chosen one ticked, and what its workers are."""
    rows = top_rows(plan)
    title = f"The best {len(rows)} deployments" if len(rows) > 1 else "The deployment"
    text = rendered_rows(rows, top_columns(plan), Format.TABLE, title=title, width=width)
    text += "".join(paragraph(pool_text(pool), width, indent="  ") for pool in plan.config["pools"])
    if len({pool["role"] for pool in plan.config["pools"]}) < len(plan.config["pools"]):
        weights = " : ".join(str(pool.get("weight", 1)) for pool in plan.config["pools"])
        text += paragraph(
            f"One router sends a request to the worker with the fewest in flight for its weight: {weights}.",
            width,
        )
    text += tie_text(plan, width)
    answer = plan.answer or {}
    idle = answer.get("num_idle_devices", 0)
    if idle:
        text += paragraph(f"{idle} of the cluster's devices stay free: {answer['idle_because']}.{_rent(plan)}", width)
    return text


def _rent(plan: Plan) -> str:
    """What dollars and rates are per, where not all devices of rented nodes serve."""
    by_device = plan.spec.get("constraints", {}).get("rent") == "device"
    if by_device or all(row.get("usd_per_hour") is None for row in plan.alternatives):
        return ""
    used = int(plan.config["num_devices"])
    which = "the one that is used" if used == 1 else f"the {used} that are used"
    rate = next(column.title for column in top_columns(plan) if column.key == "output_tokens_per_s_per_device")
    return f" USD/h counts every device of a rented node, {rate} {which}."


def tie_text(plan: Plan, width: int) -> str:
    """Which deployments the model cannot tell from the chosen one."""
    tied = [row["label"] for row in plan.alternatives if row["reason"].startswith(TIED)]
    if not tied:
        return ""
    limits = ", a higher power limit" if plan.spec.get("power_caps_w") else ""
    text = (
        f"A tie: {', '.join(tied)} within {percent(float(plan.solution.get('tie', 0.0)))} of the same objective, which "
        "is as near as a highest rate is known; the simpler deployment is chosen: fewer kinds of workers, then a lower "
        "rent, whole nodes, workers within a node, fewer stages, no router, fewer attention ranks"
        f"{limits}, lower latency."
    )
    return paragraph(text, width)


def pool_text(pool: Mapping[str, Any]) -> str:
    """Workers, layout, formats and limits of one pool."""
    layout, limits, formats = pool["layout"], pool["limits"], pool["quantization"]
    degrees = ", ".join(f"{name} {value}" for name, value in layout.items() if value > 1) or "one device"
    role = {"mixed": "", "prefill": "prefill ", "decode": "decode "}[pool["role"]]
    workers = counted(pool["num_workers"], f"{role}worker")
    schemes = dict.fromkeys((formats["mlp"], formats["attention"], formats["experts"]))
    return (
        f"{workers} on {pool['node_type']}: {_share_text(pool) or degrees}; weights {' / '.join(schemes)}, "
        f"KV cache {formats['kv_cache']}{_tier_text(pool)}{_host_text(pool)}{_ffn_text(pool)}; {_limit_text(pool)}"
        f"max_num_seqs {limits['max_num_seqs']}, "
        f"max_batched_tokens {limits['max_batched_tokens']}."
    )


def _share_text(pool: Mapping[str, Any]) -> str:
    """The part of a device that each of its workers has; empty where they have whole devices."""
    if (mps := pool.get("mps")) is not None:
        return f"one of {mps['instances']} replicas on a device under MPS"
    mig = pool.get("mig")
    return "" if mig is None else f"one MIG instance {mig['name']}, {mig['instances']} of a device"


def _limit_text(pool: Mapping[str, Any]) -> str:
    """The power limit of its devices, if it is not the board's own."""
    cap = pool.get("power_cap_w")
    return "" if cap is None else f"every device held to {cap:g} W; "


def _tier_text(pool: Mapping[str, Any]) -> str:
    """The second tier of the prefix cache, if there is one."""
    tier = pool.get("kv_tier")
    if tier is None:
        return ""
    return f", its prefixes also in {format_bytes(tier['bytes_per_device'])} of {STORES[tier['store']]} per device"


def _ffn_text(pool: Mapping[str, Any]) -> str:
    """The devices that compute its MLPs or experts, where they lie apart."""
    ffn = pool.get("ffn")
    if ffn is None:
        return ""
    batches = counted(ffn["micro_batches"], "micro-batch", "micro-batches")
    return f"; MLPs or experts of each on {ffn['num_devices']} devices of {ffn['node_type']}, {batches} in turn"


def _host_text(pool: Mapping[str, Any]) -> str:
    """Weights in host memory, and who computes with them."""
    tiers = pool.get("weight_tiers")
    if tiers is None:
        return ""
    size = format_bytes(tiers["host_bytes"])
    if tiers["way"] == "streamed":
        each = format_bytes(tiers["streamed_bytes_per_device"])
        return f"; {size} of weights in host memory, {each} of each device, read over its link in every iteration"
    most = tiers["device_prefill_tokens"]
    if tiers["way"] == "layers_on_host":
        drives = tiers.get("drive_bytes", 0.0)
        beyond = f" ({format_bytes(drives)} of it on its drives, read again in every iteration)" if drives else ""
        where = f"; {size} of {tiers['host_layers']} layers in host memory{beyond}"
        return f"{where}, computed there below {most} tokens of a batch"
    late = f" (on the devices from {most:,} tokens of an iteration on)" if most else ""
    text = (
        f"; {tiers['device_experts']} routed experts of each layer in device memory, the others, {size}, in host memory"
    )
    return f"{text} and computed there{late}"


# --- what users see --------------------------------------------------------------------------------------------------


def predicted_section(plan: Plan, width: int) -> str:
    """Latencies with their SLOs, then rates, cost and power."""
    slo = plan.spec.get("slo", {})
    names = sorted(plan.predicted, key=lambda name: (_is_rate(name), name not in slo))
    rows: list[Row] = []
    for name in names:
        interval = plan.predicted[name]
        rows.append(
            {
                "metric": metric_title(name),
                "expected": metric_text(name, interval.value),
                "between": interval_text(name, {"low": interval.low, "high": interval.high}),
                "slo": f"≤ {metric_text(name, slo[name])}" if name in slo else "",
            }
        )
    columns = (
        Column(key="metric", title="Predicted", wrap=False),
        Column(key="expected", title="expected", right=True, wrap=False),
        Column(key="slo", title="SLO", right=True, wrap=False, optional=True),
        Column(key="between", title="between"),
    )
    text = rendered_rows(rows, columns, Format.TABLE, width=width)
    known = images_text(plan, width) + speculation_text(plan, width) + stores_text(plan, width)
    return text + known + sampling_text(plan, width) + calibration_text(plan, width) + power_text(plan, width)


def _is_rate(name: str) -> bool:
    return not name.startswith(_LATENCIES)


# --- memory and time --------------------------------------------------------------------------------------------------


def memory_section(plan: Plan, width: int) -> str:
    """Memory of one device of each pool."""
    rows: Sequence[Row] = plan.memory["pools"]
    columns = (
        Column(key="pool", title="pool", derive=lambda row: row.get("pool", row["role"]), wrap=False),
        Column(key="weights_bytes", title="weights", right=True, text=gib, wrap=False),
        Column(key="workspace_bytes", title="workspace", right=True, text=gib, wrap=False),
        Column(key="kv_cache_bytes", title="KV cache", right=True, text=gib, wrap=False),
        Column(key="budget_bytes", title="budget", right=True, text=gib, wrap=False),
        Column(key="device_memory_bytes", title="device", right=True, text=gib, wrap=False),
        Column(key="host_weights_bytes", title="on host", right=True, text=gib, wrap=False, optional=True),
        Column(key="kv_capacity_tokens", title="tokens held", right=True, text=lambda n: f"{n:,}", wrap=False),
    )
    text = rendered_rows(rows, columns, Format.TABLE, title="Memory of one device in GiB", width=width)
    per_token = ", ".join(f"{row.get('pool', row['role'])} {format_bytes(row['kv_bytes_per_token'])}" for row in rows)
    experts = served_experts_text((plan.answer or {}).get("experts", ()))
    below = f"KV cache of one token on one device: {per_token}."
    return text + paragraph(below, width) + (paragraph(experts, width) if experts else "")


def time_section(plan: Plan, width: int) -> str:
    """Where an iteration's time goes, pool by pool."""
    rows = [row for row in plan.breakdown if row["share"] >= LEAST_SHARE]
    several = len({row["pool"] for row in rows}) > 1
    largest = max((row["share"] for row in rows), default=1.0)
    columns = (
        *((Column(key="pool", title="pool", wrap=False),) if several else ()),
        Column(key="name", title="Where an iteration's time goes", wrap=False),
        Column(key="seconds", title="time", right=True, text=format_duration, wrap=False),
        Column(key="share", title="share", right=True, text=percent, wrap=False),
        Column(key="share", title="", derive=lambda row: bar(row["share"] / largest, 12) or " ", wrap=False),
        Column(key="evidence", title="rests on", derive=lambda row: str(row["evidence"]).split(" to ")[0]),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width)
