"""A training plan on its page: the split of the model, the candidates, the memory of every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.cli.reports.configuration import config_text
from meshplan.cli.reports.quantities import gib, interval_text, metric_text, percent, signed_percent
from meshplan.cli.reports.training import figures
from meshplan.cli.reports.training import plan as report
from meshplan.cli.reports.training.candidates import reason_text
from meshplan.cli.reports.whole_run.forecast import SPARE_COLUMNS, SPARES_TITLE, run_sentence, run_words, spare_rows
from meshplan.cli.web.pages.views import charts
from meshplan.cli.web.pages.views.tables import table
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

# Degrees by which one copy of the model is split: field → (short, what it does in plain words).
_SPLITS: Mapping[str, tuple[str, str]] = {
    "tensor_parallel": ("TP", "{} ways inside every layer"),
    "pipeline_parallel": ("PP", "into {} groups of layers, one after the other"),
    "context_parallel": ("CP", "{} ways along the sequence"),
}
# Choices that a candidate's link pins, where they differ from the plan's.
_PINS = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline_stages",
    "context_parallel",
    "expert_parallel",
    "micro_batch_size",
    "zero_stage",
    "activation_recompute",
)
_DEGREES = (1, 2, 4, 8)


def question(plan: Plan) -> str:
    """What was asked."""
    return report.question_text(plan.spec, plan.config)


def sections(plan: Plan) -> dict[str, Any]:
    """The parts of the page that are a training plan's own."""
    return {
        "title": f"Train {plan.spec.get('model')}",
        "equation": equation(plan.config),
        "sentences": sentences(plan),
        "candidates": candidates(plan),
        "memory": memory(plan),
        "pictures": pictures(plan),
        "notes": notes(plan),
        "tables": tables(plan),
        "other_choices": other_choices(plan),
    }


def equation(config: Mapping[str, Any]) -> str:
    """The devices as a product: ``64 GPUs = 2 replicas × TP4 × PP4 × CP2``."""
    if "stages" in config:
        return f"{counted(int(config['world_size']), 'GPU')} = {config_text(config)}"
    split = " × ".join(f"{short}{config[key]}" for key, (short, _) in _SPLITS.items() if config.get(key, 1) > 1)
    replicas = counted(int(config["data_parallel"]), "replica")
    experts = f", experts over {config['expert_parallel']}" if config.get("expert_parallel", 1) > 1 else ""
    one = f" × {split}" if split else " of one GPU each"
    return f"{counted(int(config['world_size']), 'GPU')} = {replicas}{one}{experts}"


def sentences(plan: Plan) -> list[str]:
    """The answer without jargon: how the model is split, what a step and the run take, what a device holds."""
    config, predicted = plan.config, plan.predicted
    devices = int(config["world_size"])
    copies = int(config.get("data_parallel") or config["stages"][0]["data_parallel"])
    ways = [words.format(config[key]) for key, (_, words) in _SPLITS.items() if config.get(key, 1) > 1]
    split = f", split {', '.join(ways)}" if ways else ""
    if config.get("expert_parallel", 1) > 1:
        split += f"; the experts of a layer lie on {counted(int(config['expert_parallel']), 'GPU')}"
    held = f"{counted(copies, 'copy', 'copies')} of the model on {counted(devices // copies, 'GPU')}"
    first = f"Train with {held}{' each' if copies > 1 else ''}{split}."
    if "stages" in config:
        first = f"Train one model on several types of nodes: {config_text(config)}."
    step = predicted["iteration_s"]
    between = interval_text("iteration_s", {"low": step.low, "high": step.high})
    lines = [
        first,
        f"A step takes about {format_duration(step.value)} ({between}): "
        f"{metric_text('tokens_per_s', predicted['tokens_per_s'].value)} tokens a second, "
        f"{percent(predicted['mfu'].value)} of the GPUs' peak.",
    ]
    run = [metric_text(key, predicted[key].value) for key in ("run_time_s", "usd_per_run") if key in predicted]
    if run:
        lines.append(f"The whole run takes {' and '.join(run)}.")
    lines += [run_sentence(plan).strip()] if plan.run is not None else []
    worst = plan.memory["worst"]["safe_bytes"]
    lines.append(
        f"The fullest GPU holds at most {format_bytes(worst)} of {format_bytes(plan.memory['limit_bytes'])} allowed."
    )
    return lines


def candidates(plan: Plan) -> dict[str, Any]:
    """The chosen plan, those next to it, and the well-known other choices, each with why it is not the one."""
    chosen_s = plan.predicted["iteration_s"].value
    rows = [_candidate(plan, row, chosen_s) for row in plan.alternatives]
    if not rows:
        own = {"config": plan.config, "iteration_s": chosen_s, "safe_bytes": plan.memory["worst"]["safe_bytes"]}
        rows = [_candidate(plan, {**own, "chosen": True, "name": "chosen"}, chosen_s)]
    return {
        "columns": ["GPUs", "step", "against it", "GiB at most"],
        "rows": rows,
        "caption": "Candidates: the chosen one first, then its neighbours and well-known other choices",
    }


def _candidate(plan: Plan, row: Mapping[str, Any], chosen_s: float) -> dict[str, Any]:
    config, step = row.get("config"), row.get("iteration_s")
    is_chosen = bool(row.get("chosen"))
    change = None if step is None else step / chosen_s - 1.0
    reason = reason_text(row) if "reason" in row else ""
    if not reason and not is_chosen and change is not None:
        reason = "slower" if change > 0 else "a tie under the model: the simpler plan is chosen"
    choices = row.get("choices") or (_differing(plan.config, config) if config and not is_chosen else {})
    safe = row.get("safe_bytes")
    return {
        "chosen": is_chosen,
        "name": str(row["name"]) if "choices" in row else config_text(config or {}),
        "detail": config_text(config) if "choices" in row and config else "",
        "cells": [
            f"{config['world_size']:,}" if config else "–",
            "–" if step is None else format_duration(step),
            "" if is_chosen or change is None else signed_percent(change),
            "–" if safe is None else gib(safe),
        ],
        "reason": reason,
        "instead": [f"{name}={value}" for name, value in choices.items()],
    }


def _differing(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: other[key] for key in _PINS if key in other and other[key] != config.get(key)}


def memory(plan: Plan) -> list[dict[str, Any]]:
    """One stacked bar for every distinct stage."""
    limit, device = plan.memory["limit_bytes"], plan.memory["device_memory_bytes"]
    stages: Sequence[Mapping[str, Any]] = plan.memory["stages"]
    worst = plan.memory["worst"]["first_stage"]
    order = list(dict.fromkeys(name for stage in stages for name, _, _ in _components(stage)))
    bars = []
    for stage in stages:
        alike = f" and {stage['num_stages'] - 1} like it" if stage["num_stages"] > 1 else ""
        fullest = ", the fullest" if stage["first_stage"] == worst and len(stages) > 1 else ""
        bars.append(
            {
                "name": f"Stage {stage['first_stage']}{alike}{fullest}: {counted(stage['num_layers'], 'layer')}",
                "parts": charts.stacked(_components(stage), device, order),
                "typical_at": charts.share(stage["typical_bytes"], device),
                "safe_at": charts.share(stage["safe_bytes"], device),
                "limit_at": charts.share(limit, device),
                "words": f"typically {format_bytes(stage['typical_bytes'])}, at most "
                f"{format_bytes(stage['safe_bytes'])} of {format_bytes(limit)} allowed",
            }
        )
    return bars


def _components(stage: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """What lies on the device; states that are offloaded do not."""
    return [
        (key.removesuffix("_bytes").replace("_", " "), float(value), format_bytes(value))
        for key, value in stage.items()
        if key.endswith("_bytes") and key not in figures.NOT_COMPONENTS and not key.startswith("host") and value
    ]


def pictures(plan: Plan) -> list[dict[str, str]]:
    """Pictures that the plan's own addresses draw."""
    found = []
    if plan.config.get("pipeline_parallel", 1) > 1 and "stages" not in plan.config:  # several node types: no drawing
        found.append(
            {"name": "timeline", "title": "The pipeline in time", "words": "One row a stage; gray is waiting."}
        )
    if plan.mapping is not None:
        found += [
            {"name": "mapping", "title": "Which node does what", "words": "Columns are stages; red links decide."},
            {"name": "links", "title": "The links", "words": "Rows send, columns receive; dark is fast."},
        ]
    return found


def tables(plan: Plan) -> list[dict[str, Any]]:
    """What spare nodes are worth, where the whole run was asked about."""
    return [] if plan.run is None else [table(spare_rows(plan.run), SPARE_COLUMNS, caption=SPARES_TITLE)]


def notes(plan: Plan) -> list[str]:
    """What to know of the numbers, and of the mapping where there is one."""
    text = figures.calibration_text(plan, 10_000) + report.mapping_section(plan, 10_000)
    if plan.run is not None:
        text += run_words(plan.run, 10_000)
    return [line for line in text.splitlines() if line]


def other_choices(plan: Plan) -> list[dict[str, str]]:
    """Tensor-parallel degrees to compare with: what people ask first."""
    own = int(plan.config.get("tensor_parallel", 0))
    return [
        {"label": f"TP{degree}", "instead": f"tensor_parallel={degree}"}
        for degree in _DEGREES
        if degree != own and degree <= int(plan.config["world_size"])
    ]
