"""A serving plan as a Ray Serve configuration (``ray.serve.llm``), for vLLM: one LLM configuration a pool.

``engine_kwargs`` are vLLM's flags under their Python names; Ray places the workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import EmittedPlan, stamp
from meshplan.planner.emit.orchestrators import kubernetes, serving_kubernetes
from meshplan.planner.emit.serving.job import EVERY_INTERFACE, PoolProgram, ServingJob
from meshplan.planner.emit.serving.readme import serving_overview
from meshplan.planner.emit.target import Feature
from meshplan.planner.serving.problem.config import Role, Router

TARGET = "ray"
FILE = PurePosixPath("serve.yaml")
# Fields of a deployment (docs.ray.io/en/latest/serve/advanced-guides/prefix-aware-request-router.html).
_ROUTERS: Mapping[Router, Mapping[str, Any]] = {
    Router.LEAST_LOADED: {},
    Router.PREFIX_AWARE: {
        "request_router_config": {"request_router_class": "ray.serve.llm.request_router:PrefixCacheAffinityRouter"}
    },
}
_UNCHECKED = "Ray Serve's fields are not machine-checked; engine_kwargs are fields of vLLM's EngineArgs"


def wrap(job: ServingJob) -> EmittedPlan:
    """``serve.yaml`` for ``serve run`` or ``serve deploy``.

    Raises:
        CannotExpressError: another engine, data-parallel attention, another router, or named hosts or devices.
    """
    serving_kubernetes.refuse_places(job, TARGET)
    serving_kubernetes.refuse_mooncake(job, TARGET)
    if job.target != "vllm":
        raise CannotExpressError(TARGET, f"the engine {job.target}", "a plan for vllm")
    if job.router is not None and job.request.config.router not in _ROUTERS:
        raise CannotExpressError(
            TARGET,
            "a router that takes turns: Ray Serve takes the less loaded of two replicas, or one with the prefix",
            "router least_loaded or prefix_aware",
        )
    programs = {program.pool.role: program for program in job.programs}
    if Role.MIXED in programs:
        builder = "build_openai_app"
        arguments: dict[str, Any] = {"llm_configs": [_config(job, programs[Role.MIXED])]}
    else:
        builder = "build_pd_openai_app"
        arguments = {f"{role.value}_config": _config(job, programs[role]) for role in (Role.PREFILL, Role.DECODE)}
    application = {"name": "llm", "route_prefix": "/", "import_path": f"ray.serve.llm:{builder}", "args": arguments}
    document = {"http_options": {"host": EVERY_INTERFACE, "port": job.request.port}, "applications": [application]}
    head = (*stamp(job.request.plan, job.verified), f"schema: {_UNCHECKED}")
    notes = ("Ray places workers where it finds devices.", _UNCHECKED)
    start = f"Start with `serve run {FILE}` on a Ray cluster that has the devices."
    return EmittedPlan(
        target=TARGET,
        artifacts=(
            serving_overview(job, num_hosts=0, start=start, notes=notes),
            kubernetes.yaml_file(FILE, head, [document]),
        ),
        parser_verified=job.verified,
        notes=(*job.notes, *notes),
    )


def engine_kwargs(program: PoolProgram) -> dict[str, Any]:
    """Flags of vLLM as Python arguments."""
    arguments: dict[str, Any] = {}
    for flag, *value in program.flags:
        name = flag.removeprefix("--").replace("-", "_")
        if not value:
            arguments[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            arguments[name] = _value(value[0])
    if program.num_nodes > 1:
        arguments["distributed_executor_backend"] = "ray"
    return arguments


def _value(text: str) -> Any:
    """A number or an object where it is one."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _config(job: ServingJob, program: PoolProgram) -> Mapping[str, Any]:
    if program.pool.layout.attention_data_parallel > 1:
        raise CannotExpressError(TARGET, "data-parallel attention inside a worker", "target lws, dynamo or kserve")
    return {
        "model_loading_config": {"model_id": job.request.model, "model_source": job.request.model},
        "deployment_config": {
            "num_replicas": program.pool.num_workers,
            "max_ongoing_requests": program.pool.limits.max_num_seqs,
            **({} if job.router is None else _ROUTERS[job.request.config.router]),
        },
        "engine_kwargs": engine_kwargs(program),
    }


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (
        Feature(name="workers", expressed_by="deployment_config.num_replicas", verified_by="golden only"),
        Feature(
            name="configuration",
            expressed_by="engine_kwargs; vLLM without data-parallel attention",
            verified_by="names of vLLM's EngineArgs, values of its parser",
        ),
    )
