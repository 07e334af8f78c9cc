"""Published figures of whole training jobs beside what is predicted, with the interval: nothing is fitted to them.

    python tests/benchmarks/published_training.py POINTS.json [--best]

POINTS.json lists points with ``id``, ``quantity`` and ``value``. What they leave out is in :data:`JOBS`, with where it
is from. Each job is asked for by its published layout, and with ``--best`` (two minutes of CPU) also for the best plan
of the same devices and batch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import MeshplanError
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import load_catalog, make_plan

HOURS_PER_SECOND = 1.0 / 3600.0
TOKENS = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as a spec says it.

    Args:
        model: of the catalog.
        nodes: type and number.
        workload: of the spec.
        fixed: choices that are published.
        metric: what a plan calls the published quantity.
        also: practices of the job that hold in both questions.
        target: whose rules hold.
        note: where the rest is from.
    """

    model: str
    nodes: tuple[str, int]
    workload: Mapping[str, Any]
    fixed: Mapping[str, Any]
    metric: str
    also: Mapping[str, Any] = field(default_factory=dict)
    target: str = "megatron"
    note: str = ""


def on_frontier(model: str, *, nodes: int, tensor: int, pipeline: int, batch: int) -> Job:
    """A job of arXiv:2312.12705: Megatron-DeepSpeed in fp16 with ZeRO-1 and activation checkpointing."""
    return Job(
        model=model,
        nodes=("hgx-mi250x-dies", nodes),
        workload={"sequence_length": 2048, "global_batch_size": batch, "precision": "fp16"},
        fixed={
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "virtual_pipeline_stages": 1,
            "micro_batch_size": 1,
            "zero_stage": 1,
            "activation_recompute": "full",
        },
        metric="mfu",
        note="layout and batch are assumed: the abstract has neither",
    )


JOBS = {
    "deepseek-v3-pretraining": Job(
        model="deepseek-v3",
        nodes=("h800-sxm-8", 256),
        workload={"sequence_length": 4096, "global_batch_size": 15360, "precision": "fp8"},
        fixed={
            "tensor_parallel": 1,
            "pipeline_parallel": 16,
            "expert_parallel": 64,
            "zero_stage": 1,
            "pipeline_schedule": "zb-v",
            "micro_batch_size": 1,
            "activation_recompute": "selective",
            "recompute_modules": ["layernorm", "mla_up_proj"],
        },
        metric="tokens_per_s_per_device",
        also={"expert_dispatcher": "deepep", "expert_parallel_overlap": True},
        target="any",
        note="section 3.2: its own dispatcher behind compute, norms and up-projections again; DualPipe priced as zb-v",
    ),
    "frontier-22b": on_frontier("megatron-22b", nodes=8, tensor=2, pipeline=8, batch=512),
    "frontier-175b": on_frontier("gpt3-175b", nodes=128, tensor=4, pipeline=16, batch=10240),
    "frontier-1t": on_frontier("megatron-1t", nodes=384, tensor=8, pipeline=64, batch=9600),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--best", action="store_true", help="search for the best plan, too")
    asked = parser.parse_args()
    catalog = load_catalog("sqlite://")
    for point in json.loads(asked.points.read_text(encoding="utf-8"))["points"]:
        if point["id"] in JOBS:
            for line in lines(point, JOBS[point["id"]], catalog, best=asked.best):
                print(line)


def lines(point: Mapping[str, Any], job: Job, catalog: Catalog, *, best: bool) -> Iterator[str]:
    """The published figure, then the predictions."""
    published = float(point["value"])
    if point["quantity"] == "device_hours_per_1e12_tokens":
        published = TOKENS * HOURS_PER_SECOND / published
    yield f"{point['id']}: {job.metric} {published:.4g} published; {job.note}"
    questions = {"published layout": {**job.fixed, **job.also}, **({"best plan": dict(job.also)} if best else {})}
    for title, fixed in questions.items():
        try:
            plan = make_plan(question(job, fixed), catalog)
        except MeshplanError as error:
            yield f"  {title}: {error}"
            continue
        yield f"  {title}: {compared(plan, job.metric, published)}"


def question(job: Job, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """A spec."""
    slug, count = job.nodes
    return {
        "kind": "training",
        "model": job.model,
        "cluster": {"nodes": [{"type": slug, "count": count}]},
        "workload": dict(job.workload),
        "constraints": {"target": job.target},
        "fixed": dict(fixed),
    }


def compared(plan: Plan, metric: str, published: float) -> str:
    """Predicted against published."""
    found = plan.predicted[metric]
    inside = "inside" if found.low <= published <= found.high else "outside"
    degrees = " ".join(
        f"{axis[0]}{plan.config[f'{axis}_parallel']}" for axis in ("tensor", "pipeline", "expert", "data")
    )
    return (
        f"{found.value:.4g} [{found.low:.4g}, {found.high:.4g}], {found.value / published - 1.0:+.1%}, {inside}; "
        f"{degrees}, micro-batch {plan.config['micro_batch_size']}, recompute {plan.config['activation_recompute']}"
    )


if __name__ == "__main__":
    main()
