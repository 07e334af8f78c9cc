"""The plan of a diffusion question: what was chosen, what it will take and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshplan.planner.core.plan import Interval, Plan, PlanIdentity, own_version, plain
from meshplan.planner.diffusion.problem.degrees import DiffusionConfig, short_config
from meshplan.planner.diffusion.problem.problem import DiffusionProblem
from meshplan.planner.diffusion.problem.spec import DiffusionObjective
from meshplan.planner.diffusion.resolve import Resolved
from meshplan.planner.diffusion.search.preference import simplicity
from meshplan.planner.diffusion.search.priced import Priced
from meshplan.planner.diffusion.search.search import Searched

# Degrees that no measured run has: half-widths of intervals are that much wider.
UNMEASURED = ("cfg_parallel", "pipefusion", "tensor_parallel")
WIDER = 2.0
SMALLEST_SHARE = 0.001


def unmeasured(problem: DiffusionProblem, config: DiffusionConfig) -> tuple[str, ...]:
    """What of a configuration no measured run confirms."""
    found = [name for name in UNMEASURED if getattr(config, name) > 1]
    if config.replica_devices > problem.machine.domain_size:
        found.append("a replica over several nodes")
    if problem.calibration.num_runs == 0:
        found.append(f"the hardware generation {problem.machine.device.architecture}")
    elif problem.machine.device.slug not in problem.calibration.devices:
        found.append(f"the device {problem.machine.device.slug}")
    return tuple(found)


def intervals(problem: DiffusionProblem, found: Priced, index: int) -> dict[str, Interval]:
    """Metric → prediction, with the 90th percentile of the error on models that no constant was fitted to."""
    config = found.config(index)
    is_wider = any(name in UNMEASURED or "nodes" in name for name in unmeasured(problem, config))
    values = {
        "latency_s": (found.latency_s, "latency"),
        f"{problem.item}s_per_s": (found.items_per_s, "latency"),
        "power_w": (found.power_w, "power"),
        "energy_per_item_j": (found.energy_per_item_j, "energy"),
        "usd_per_item": (found.usd_per_item, "latency"),
    }
    made = {}
    for name, (array, metric) in values.items():
        value = float(array[index])
        if math.isfinite(value):
            factor = math.exp(problem.calibration.error_p90[metric] * (WIDER if is_wider else 1.0))
            made[name] = Interval(value=value, low=value / factor, high=value * factor)
    return made


def memory_document(problem: DiffusionProblem, found: Priced, index: int) -> dict[str, Any]:
    """Bytes of a rank; all ranks of a replica hold as much."""
    held = found.memory
    return {
        "worst": {
            "transformer_bytes": float(held.transformer_bytes[index]),
            "text_encoders_and_vae_bytes": float(held.resident_bytes[index]),
            "activation_bytes": float(held.activation_bytes[index]),
            "context_bytes": float(held.fixed_bytes[index]),
            "typical_bytes": float(held.typical_bytes[index]),
            "bound_bytes": float(held.bound_bytes[index]),
        },
        "usable_bytes": problem.machine.device.usable_memory_bytes,
    }


def breakdown(problem: DiffusionProblem, found: Priced, index: int) -> list[dict[str, Any]]:
    """Where the latency goes, the largest part first."""
    total = float(found.latency_s[index])
    level = "fitted to published measurements" if problem.calibration.num_runs else "assumed"
    rows = [
        (name, float(seconds[index] if np.ndim(seconds) else seconds)) for name, seconds in found.taken.parts().items()
    ]
    return [
        {"name": name, "seconds": max(seconds, 0.0), "share": max(seconds, 0.0) / total, "evidence": level}
        for name, seconds in sorted(rows, key=lambda row: -row[1])
        if seconds > SMALLEST_SHARE * total
    ]


def row_of(problem: DiffusionProblem, found: Priced, index: int) -> dict[str, Any]:
    """A candidate as a row of the plan's table."""
    values = {name: one.value for name, one in intervals(problem, found, index).items()}
    return {
        "config": plain(found.config(index)),
        "num_devices": int(found.devices[index]),
        **values,
        "memory_bound_bytes": float(found.memory.bound_bytes[index]),
    }


def alternatives(problem: DiffusionProblem, searched: Searched, top: int) -> list[dict[str, Any]]:
    """The best configurations that keep every limit, then the best of each number of devices of a replica."""
    found = searched.found
    if found is None:
        return []
    kept = np.flatnonzero(searched.kept).tolist()
    order = sorted(kept, key=lambda i: (float(searched.cost[i]), simplicity(found.configs[i])))
    if searched.best is not None:
        order = [searched.best, *(i for i in order if i != searched.best)]
    rows = [{**row_of(problem, found, int(i)), "why": "best" if i == searched.best else "next"} for i in order[:top]]
    listed = set(order[:top])
    sizes: dict[int, int] = {}
    for i in order:
        sizes.setdefault(found.configs[i].replica_devices, int(i))
    return rows + [
        {**row_of(problem, found, i), "why": f"best of {size} devices"}
        for size, i in sorted(sizes.items())
        if i not in listed
    ]


def rejected_rows(problem: DiffusionProblem, searched: Searched) -> list[dict[str, Any]]:
    """What rules and limits rule out, with counts."""
    rows = [{"reason": reason, "count": count, "example": None} for reason, count in searched.illegal.most_common()]
    found = searched.found
    for name, mask in searched.broken.items():
        if found is not None and mask.any():
            first = int(np.flatnonzero(mask)[0])
            rows.append(
                {
                    "reason": f"over the limit: {name}",
                    "count": int(mask.sum()),
                    "example": short_config(found.config(first)),
                }
            )
    return rows


def provenance(resolved: Resolved, config: DiffusionConfig | None) -> dict[str, Any]:
    """What the numbers rest on."""
    problem = resolved.problem
    calibration = problem.calibration
    return {
        "meshplan": own_version(),
        "sources": dict(resolved.sources),
        "model": plain(problem.job.model),
        "job": {name: getattr(problem.job, name) for name in ("height", "width", "frames", "steps")},
        "node_type": problem.node_type,
        "devices_per_host": problem.machine.devices_per_host,
        "calibration": {
            "architecture": calibration.architecture,
            "num_runs": calibration.num_runs,
            "error_p90": dict(calibration.error_p90),
            "order_error": calibration.order_error,
        },
        "unmeasured": [] if config is None else list(unmeasured(problem, config)),
    }


def content(resolved: Resolved) -> Mapping[str, Any]:
    """Every catalog entry that the answer rests on."""
    problem = resolved.problem
    return {
        "model": plain(problem.job.model),
        "machine": plain(problem.machine),
        "price": None if resolved.price is None else plain(resolved.price),
        "calibration": problem.calibration.to_document(),
    }


def make_plan(
    resolved: Resolved,
    searched: Searched,
    index: int,
    *,
    solution: Mapping[str, Any],
    identity: PlanIdentity,
    top: int,
) -> Plan:
    """The plan of one candidate.

    Args:
        resolved: the question.
        searched: all candidates.
        index: the chosen one.
        solution: the solver's report.
        identity: see :func:`meshplan.planner.core.plan.plan_identity`.
        top: candidates to list.
    """
    problem, found = resolved.problem, searched.found
    if found is None:
        raise AssertionError("a candidate was chosen of none")
    config = found.config(index)
    return Plan(
        config=plain(config),
        predicted=intervals(problem, found, index),
        memory=memory_document(problem, found, index),
        breakdown=tuple(breakdown(problem, found, index)),
        provenance=provenance(resolved, config),
        solution={
            **solution,
            "utilization": float(found.utilization[index]),
            "num_devices": int(found.devices[index]),
        },
        alternatives=tuple(alternatives(problem, searched, top)),
        rejected=tuple(rejected_rows(problem, searched)),
        **identity,
    )


def objective_value(problem: DiffusionProblem, cost: float) -> float:
    """The objective as people write it: throughput is items/s for each device, its cost the reverse."""
    return 1.0 / cost if problem.objective is DiffusionObjective.THROUGHPUT_PER_DEVICE else cost
