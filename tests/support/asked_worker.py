"""The worker of a question about one node, as tests of bounds take it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.workers import PricedWorker, priced_workers


def question(model: str, node: str, tensor: int, **workload: Any) -> dict[str, Any]:
    return {
        "kind": "serving",
        "model": model,
        "cluster": {"nodes": [{"type": node, "count": 1}]},
        "workload": {"input_length": 512, "output_length": 512, "num_requests": 200, **workload},
        "fixed": {"mode": "aggregated", "tensor_parallel": tensor},
    }


def worker_of(catalog: Catalog, *asked: Any) -> PricedWorker:
    problem = resolve_serving(read_serving_spec(question(*asked)), catalog, Path()).problem
    kinds = priced_workers(problem, Role.MIXED, Counter())
    return next(kind for kind in kinds if kind.placed.layout.num_devices == asked[2])
