"""How a training configuration reads: its degrees in one line, and the columns of the table of candidates."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_duration, format_usd
from meshplan.cli.render import Column, Row
from meshplan.cli.reports.quantities import JOULES_PER_KWH, TICK, gib
from meshplan.planner.training.problem.problem import OFFLOADED_LAYERS, OFFLOADS


def layers_text(layers: Sequence[int]) -> str:
    """Layer counts with runs of equal ones joined: [10, 10, 11] → '10 ×2, 11'."""
    runs = [(value, len(list(run))) for value, run in itertools.groupby(layers)]
    return ", ".join(f"{value} ×{count}" if count > 1 else str(value) for value, count in runs)


def config_text(config: Mapping[str, Any]) -> str:
    """The degrees of a configuration in one line; those that are 1 are left out.

    >>> config_text({"tensor_parallel": 2, "pipeline_parallel": 8, "data_parallel": 1, "micro_batch_size": 1})
    'TP2 PP8'
    """
    if "stages" in config:
        return _stages_text(config["stages"])
    short = {
        "tensor_parallel": "TP",
        "pipeline_parallel": "PP",
        "virtual_pipeline_stages": "VPP",
        "context_parallel": "CP",
        "data_parallel": "DP",
        "expert_parallel": "EP",
        "micro_batch_size": "mbs",
    }
    shown = {**config, "context_parallel": _context(config)} if config.get("context_parallel", 1) != 1 else config
    parts = [f"{label}{shown[key]}" for key, label in short.items() if config.get(key, 1) != 1]
    if config.get("zero_stage"):
        parts.append(f"ZeRO-{config['zero_stage']}{_sharding_marks(config)}{_groups(config)}")
    states = [name for name in ("optimizer", "parameters") if config.get(OFFLOADS[name])]
    if states:
        share = config.get("optimizer_offload_percent")
        part = "" if share is None else f"{share} % of "
        parts.append(f"{part}{' and '.join(states)} on {config.get('offload_to', 'host')}")
    if config.get(OFFLOADS["activations"]):
        parts.append("activations on host")
    if layers := config.get(OFFLOADED_LAYERS):
        parts.append(f"activations of {layers} layers on {config.get('offload_to', 'host')}")
    if config.get("activation_recompute", "none") != "none":
        parts.append(f"{_recompute(config)} recompute")
    return " ".join(parts) or "a single device"


def _stages_text(stages: Sequence[Mapping[str, Any]]) -> str:
    """Stages on several node types in one line."""
    kinds = [(one["node_type"], one["tensor_parallel"], one["data_parallel"]) for one in stages]
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
    return " → ".join(f"{count} × {name} TP{tensor} DP{data}" for (name, tensor, data), count in runs)


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


def _groups(config: Row) -> str:
    """Devices that share one copy of the states where not all replicas do, those of a split sequence among them."""
    shard = config.get("data_parallel_shard", config.get("data_parallel", 1))
    devices = shard * config.get("context_parallel", 1)
    return f" in groups of {devices}" if shard != config.get("data_parallel", 1) else ""


def _context(row: Row) -> str:
    """Degree of context parallelism, with its style where that is not the default ring."""
    style, heads = row.get("context_parallel_style"), row.get("context_parallel_heads", 1)
    degree = str(row["context_parallel"])
    if style is None:
        return degree
    return f"{degree} {style}" if heads == 1 else f"{heads}×{row['context_parallel'] // heads} {style}"


def _zero(row: Row) -> str:
    shard, data = row["data_parallel_shard"], row["data_parallel"]
    return f"{row['zero_stage']}/{shard}" if row["zero_stage"] and shard != data else str(row["zero_stage"])


def _recompute_kept(row: Row) -> str:
    """Recompute mode; ``+host`` where the kept activations are offloaded to host memory, with the layers' number where
    nothing is recomputed.
    """
    if layers := row.get(OFFLOADED_LAYERS):
        return f"{_recompute(row)}+{layers} {row.get('offload_to', 'host')}"
    return f"{_recompute(row)}+host" if row.get(OFFLOADS["activations"]) else _recompute(row)


def _zero_states(row: Row) -> str:
    """ZeRO stage and group size, other sharding; ``+host`` or ``+nvme`` where states or parameters are offloaded, with
    the per cent of the optimizer states where that is not all.
    """
    away = row.get("optimizer_offload") or row.get("parameter_offload")
    part = row.get("optimizer_offload_percent", "")
    place = f"+{part}{'%' if part else ''}{row.get('offload_to', 'host')}" if away else ""
    return f"{_zero(row)}{_sharding_marks(row)}{place}"


def _experts(row: Row) -> str:
    if row["expert_parallel"] * row["expert_tensor_parallel"] == 1:
        return ""
    tensor = row["expert_tensor_parallel"]
    return f"{row['expert_parallel']}×{tensor}" if tensor > 1 else str(row["expert_parallel"])


# Objective → the metric that its plans are compared by beside their step, and its word.
COSTS = {"energy": ("energy_j_per_step", "joules"), "usd_per_run": ("usd_per_run", "money")}


def _kwh(joules: float) -> str:
    """Four digits: the plans of a table differ by less than a per cent."""
    return f"{joules / JOULES_PER_KWH:.4g}"


TOP_COLUMNS = (
    Column(key="chosen", title="", text=lambda chosen: TICK if chosen else " ", wrap=False),
    Column(key="tensor_parallel", title="TP", right=True, wrap=False),
    Column(key="pipeline_parallel", title="PP", right=True, wrap=False),
    Column(key="virtual_pipeline_stages", title="VPP", right=True, wrap=False),
    Column(key="context_parallel", title="CP", derive=_context, right=True, wrap=False),
    Column(key="data_parallel", title="DP", right=True, wrap=False),
    Column(key="expert_parallel", title="EP", right=True, derive=_experts, optional=True, wrap=False),
    Column(key="micro_batch_size", title="mbs", right=True, wrap=False),
    Column(key="activation_recompute", title="recompute", derive=_recompute_kept, wrap=False),
    Column(key="zero_stage", title="ZeRO", derive=_zero_states, right=True, wrap=False),
    Column(key="world_size", title="dev.", right=True, wrap=False),
    Column(key="iteration_s", title="step", right=True, text=format_duration, wrap=False),
    Column(
        key="tokens_per_s_per_device",
        title="tok/s/dev",
        right=True,
        text=lambda rate: f"{rate:,.0f}",
        optional=True,
        wrap=False,
    ),
    Column(key="energy_j_per_step", title="kWh/step", right=True, text=_kwh, optional=True, wrap=False),
    Column(key="usd_per_run", title="run", right=True, text=format_usd, optional=True, wrap=False),
    Column(key="safe_bytes", title="GiB", right=True, text=gib, wrap=False),
)
