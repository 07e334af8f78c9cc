"""Published figures of whole training jobs beside what is predicted, with the interval: nothing is fitted to them.

    python tests/benchmarks/published_training.py POINTS.json [--best]

POINTS.json lists points with ``id``, ``quantity`` and ``value``. What they leave out is in :data:`JOBS`, with where it
is from. Each job is asked for by its published layout, and with ``--best`` (two minutes of CPU) also for the best plan
of the same devices and batch, which is that of the framework that ``target`` names.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import MeshplanError
from meshplan.planner.core.plan import Interval
from meshplan.planner.service import load_catalog, make_plan
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.pinned import fixed_config
from meshplan.planner.training.plan import config_document, predicted
from meshplan.planner.training.service import resolve

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
        layout: what its framework does otherwise than ``target``, as fields of
            :class:`~meshplan.catalogs.constants.training.FrameworkRecipe`.
        note: where the rest is from.
    """

    model: str
    nodes: tuple[str, int]
    workload: Mapping[str, Any]
    fixed: Mapping[str, Any]
    metric: str
    also: Mapping[str, Any] = field(default_factory=dict)
    target: str = "megatron"
    layout: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


# DeepSpeed's pipeline (deepspeedai/DeepSpeed at 03f6f75, runtime/pipe/engine.py and p2p.py): a stage sends and receives
# one message after the other, each split over the tensor-parallel ranks (``pipe_partitioned`` and ``grad_partitioned``,
# on unless asked, runtime/config.py), and reduces gradients after the last backward pass (_exec_reduce_grads). The
# Megatron-LM in Megatron-DeepSpeed is that of 2022, whose collectives run beside no product.
DEEPSPEED_PIPELINE = {
    "overlaps_tensor_parallel": False,
    "overlaps_data_parallel": False,
    "overlaps_pipeline": False,
    "sends_in_turn": True,
}


def on_frontier(model: str, *, nodes: int, tensor: int, pipeline: int, batch: int) -> Job:
    """A job of arXiv:2312.12705: Megatron-DeepSpeed in fp16 with ZeRO-1 and activation checkpointing.

    DeepSpeed's pipeline splits what it sends itself, so that norms and dropout are not split over the ranks.
    """
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
            "sequence_parallel": False,
        },
        metric="mfu",
        layout=DEEPSPEED_PIPELINE,
        note="degrees and batch are assumed: the abstract has neither",
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
    asked = {"published layout": {**job.fixed, **job.also}, **({"best plan": dict(job.also)} if best else {})}
    for title, choices in asked.items():
        answer = as_run if job.layout and title == "published layout" else as_planned
        try:
            config, found = answer(job, choices, catalog)
        except MeshplanError as error:
            yield f"  {title}: {error}"
            continue
        yield f"  {title}: {compared(config, found, published)}"


def as_planned(job: Job, choices: Mapping[str, Any], catalog: Catalog) -> tuple[Mapping[str, Any], Interval]:
    """The best plan with these choices of the framework that ``target`` names."""
    plan = make_plan(question(job, choices), catalog)
    return plan.config, plan.predicted[job.metric]


def as_run(job: Job, choices: Mapping[str, Any], catalog: Catalog) -> tuple[Mapping[str, Any], Interval]:
    """These choices and plain ones for the rest, with the layout of the framework that ran them."""
    resolved = resolve(question(job, choices), catalog)
    constants = resolved.problem.calibration
    constants = replace(constants, recipe=replace(constants.recipe, **job.layout))
    problem = resolved.problem.with_calibration(constants)
    priced = price(problem, fixed_config(problem))
    return config_document(priced.config), predicted(replace(resolved, problem=problem), priced)[job.metric]


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


def compared(config: Mapping[str, Any], found: Interval, published: float) -> str:
    """Predicted against published."""
    inside = "inside" if found.low <= published <= found.high else "outside"
    degrees = " ".join(f"{axis[0]}{config[f'{axis}_parallel']}" for axis in ("tensor", "pipeline", "expert", "data"))
    return (
        f"{found.value:.4g} [{found.low:.4g}, {found.high:.4g}], {found.value / published - 1.0:+.1%}, {inside}; "
        f"{degrees}, micro-batch {config['micro_batch_size']}, recompute {config['activation_recompute']}"
    )


if __name__ == "__main__":
    main()
