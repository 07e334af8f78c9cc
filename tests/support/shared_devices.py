"""A question about one small model on one GPU, which several servers may share: by MIG, or under MPS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import make_plan
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving

WHOLE: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.2-1b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}], "usd_per_hour_per_node": 24.0},
    "workload": {"input_length": 64, "output_length": 64, "num_requests": 256},
    "slo": {"ttft_p99_s": 2.0, "tpot_p99_s": 0.05},
    "fixed": {"mode": "aggregated", "tensor_parallel": 1},
    "constraints": {"max_devices": 1, "rent": "device"},
}


def problem_with(catalog: Catalog, **changes: Any) -> ServingProblem:
    """The question with other fields, as the search gets it."""
    return resolve_serving(read_serving_spec({**WHOLE, **changes}), catalog, Path()).problem


def shared_and_whole(catalog: Catalog, **shares: Any) -> dict[bool, Plan]:
    """Plans with ways to share the device to choose from, and without."""
    return {True: make_plan({**WHOLE, **shares}, catalog), False: make_plan(WHOLE, catalog)}
