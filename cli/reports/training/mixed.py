"""A training plan on several node types: its stages by pool, and the best plan of each pool beside it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.configuration import layers_text
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import gib
from meshplan.planner.core.plan import Plan


def is_mixed(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of stages on several node types."""
    return "stages" in config


def _kind(stage: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(value for key, value in stage.items() if key != "num_layers")


def stages_section(plan: Plan, width: int) -> str:
    """One line for each run of stages with the same node type and degrees."""
    memory, rows = plan.memory["stages"], []
    place = 0
    for _, run in itertools.groupby(plan.config["stages"], key=_kind):
        stages = list(run)
        own = memory[place : place + len(stages)]
        last = place + len(stages) - 1
        rows.append(
            {
                **stages[0],
                "place": f"{place}" if last == place else f"{place}–{last}",
                "layers": layers_text([stage["num_layers"] for stage in stages]),
                "devices": sum(stage["tensor_parallel"] * stage["data_parallel"] for stage in stages),
                "micro_batch_s": max(one.get("micro_batch_s", 0.0) for one in own),
                "memory": max(own, key=lambda one: one["safe_bytes"]),
            }
        )
        place += len(stages)
    columns = (
        Column(key="place", title="Stage", wrap=False),
        Column(key="node_type", title="on"),
        Column(key="devices", title="GPUs", right=True),
        Column(key="layers", title="layers", right=True),
        Column(key="tensor_parallel", title="TP", right=True),
        Column(key="data_parallel", title="DP", right=True),
        Column(key="micro_batch_size", title="mbs", right=True),
        Column(key="activation_recompute", title="recompute"),
        Column(key="micro_batch_s", title="micro-batch", right=True, text=format_duration, wrap=False),
        Column(key="memory", title="GiB safe/limit", right=True, derive=_memory_text, wrap=False),
    )
    table = rendered_rows(rows, columns, Format.TABLE, title="Stages in pipeline order", width=width)
    config = plan.config
    rounds = f"{config['num_microbatches']} micro-batches a step; ZeRO-{config['zero_stage']} over a stage's replicas."
    return table + paragraph(rounds, width)


def _memory_text(row: Row) -> str:
    memory = row["memory"]
    return f"{gib(memory['safe_bytes'])}/{gib(memory['device_limit'])}"


def alone_section(plan: Plan, width: int) -> str:
    """The best plan of each node type by itself, beside the chosen one."""
    rows: list[Row] = [
        {**row, "devices": (row["config"] or {}).get("world_size")} for row in plan.alternatives if "config" in row
    ]
    if not rows:
        return ""
    columns = (
        Column(key="name", title="On", wrap=False),
        Column(key="devices", title="GPUs", right=True),
        Column(key="iteration_s", title="step", right=True, text=_time, wrap=False),
        Column(key="reason", title=""),
    )
    return rendered_rows(rows, columns, Format.TABLE, title="Together, and each type by itself", width=width)


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_duration(seconds)


def rows_of(plan: Plan) -> Sequence[Row]:
    """The stages as rows, for CSV and Markdown."""
    return [{"stage": index, **stage} for index, stage in enumerate(plan.config["stages"])]


COLUMNS = (
    Column(key="stage", title="stage", right=True),
    Column(key="node_type", title="node type"),
    Column(key="num_layers", title="layers", right=True),
    Column(key="tensor_parallel", title="TP", right=True),
    Column(key="data_parallel", title="DP", right=True),
    Column(key="micro_batch_size", title="mbs", right=True),
    Column(key="activation_recompute", title="recompute"),
)
