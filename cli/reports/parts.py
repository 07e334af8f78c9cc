"""What the reports of several kinds share: paragraphs, clusters, effort, and what was rejected."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration, format_usd
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.training.problem.problem import OFFLOADS

TICK = "✔"


# Rejection reasons that are listed by name; the rest is counted.
MOST_REASONS = 8


def cluster_text(cluster: Mapping[str, Any]) -> str:
    """The hardware of a spec: node groups, or devices by node."""
    if cluster.get("nodes"):
        return " + ".join(f"{group['count']} × {group['type']}" for group in cluster["nodes"])
    devices = cluster.get("devices", {})
    return f"{counted(devices.get('nodes', 0), 'node')} of {devices.get('per_node')} × {devices.get('type')}"


def model_on_cluster(spec: Mapping[str, Any]) -> str:
    """The question in short, for lists of plans."""
    return f"{spec['model']} on {cluster_text(spec['cluster'])}"


def effort_text(solution: Mapping[str, Any]) -> str:
    """Solver and processor time; a plan file has no clock times."""
    spent = solution.get("cpu_s")
    return str(solution["solver"]) if spent is None else f"{solution['solver']}, {spent:.2f} s of one core"


def paragraph(text: str, width: int, indent: str = "") -> str:
    """Wrapped text, newline at the end; an address stays in one piece, so that it can be opened."""
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def layers_text(layers: Sequence[int]) -> str:
    """Layer counts with runs of equal ones joined: [10, 10, 11] → '10 ×2, 11'."""
    runs = [(value, len(list(run))) for value, run in itertools.groupby(layers)]
    return ", ".join(f"{value} ×{count}" if count > 1 else str(value) for value, count in runs)


def rejected_section(plan: Plan, width: int) -> str:
    """Rejected candidates: reason, count, the nearest miss."""
    rows = [row for row in plan.rejected if row["count"]]
    if not rows:
        return ""
    shown = rows[:MOST_REASONS]
    columns = (
        Column(key="reason", title="Rejected because"),
        Column(key="count", title="count", right=True, text=lambda count: f"{count:,}", wrap=False),
        Column(key="nearest_miss", title="example or nearest miss", derive=_miss),
    )
    text = rendered_rows(shown, columns, Format.TABLE, width=width)
    more = len(rows) - len(shown)
    return text + (f"and {counted(more, 'more reason')}: --format json lists them\n" if more else "")


def _miss(row: Row) -> str:
    example, excess = row.get("example"), row.get("nearest_miss")
    if isinstance(example, str):
        return example
    if excess is None or not isinstance(example, Mapping):
        return ""
    limit = str(row["reason"]).removeprefix("over the limit: ")
    format_excess = {"step time": format_duration, "cost of the run": format_usd}.get(limit, format_bytes)
    return f"{format_excess(excess)} too much with {config_text(example)}"


def config_text(config: Mapping[str, Any]) -> str:
    """The degrees of a configuration in one line; those that are 1 are left out.

    >>> config_text({"tensor_parallel": 2, "pipeline_parallel": 8, "data_parallel": 1, "micro_batch_size": 1})
    'TP2 PP8'
    """
    short = {
        "tensor_parallel": "TP",
        "pipeline_parallel": "PP",
        "virtual_pipeline_stages": "VPP",
        "context_parallel": "CP",
        "data_parallel": "DP",
        "expert_parallel": "EP",
        "micro_batch_size": "mbs",
    }
    parts = [f"{label}{config[key]}" for key, label in short.items() if config.get(key, 1) != 1]
    if config.get("zero_stage"):
        parts.append(f"ZeRO-{config['zero_stage']}{_sharding_marks(config)}")
    if config.get("context_parallel_style"):
        parts.append(f"CP {_context(config)}")
    states = [name for name in ("optimizer", "parameters") if config.get(OFFLOADS[name])]
    if states:
        parts.append(f"{' and '.join(states)} on {config.get('offload_to', 'host')}")
    if config.get(OFFLOADS["activations"]):
        parts.append("activations on host")
    if config.get("activation_recompute", "none") != "none":
        parts.append(f"{_recompute(config)} recompute")
    return " ".join(parts) or "a single device"


def _recompute(row: Row) -> str:
    """The mode, with the layers per chunk where only some are recomputed."""
    mode, layers = str(row["activation_recompute"]), row.get("recompute_num_layers", 0)
    return f"{mode} {layers}" if layers else mode


def _sharding_marks(row: Row) -> str:
    """Marks for hpZ secondary shards, outer ZeRO, and layers whose parameters stay gathered."""
    marks = [
        f"+hpz{row['zero_hpz_partition_size']}" if row.get("zero_hpz_partition_size", 1) > 1 else "",
        "+outer" if row.get("outer_zero_stage") else "",
        f"+kept{row['gathered_num_layers']}" if row.get("gathered_num_layers") else "",
    ]
    return "".join(marks)


def _context(row: Row) -> str:
    """Degree of context parallelism, with its style where that is not the default ring."""
    style, heads = row.get("context_parallel_style"), row.get("context_parallel_heads", 1)
    degree = str(row["context_parallel"])
    if style is None:
        return degree
    return f"{degree} {style}" if heads == 1 else f"{heads}×{row['context_parallel'] // heads} {style}"
