"""A serving plan as a KServe LLMInferenceService (serving.kserve.io/v1alpha2); KServe runs vLLM.

KServe mounts the model, makes the groups of pods and schedules requests itself; the engine's arguments are the plan's.
"""

from __future__ import annotations

from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.orchestrators import serving_kubernetes as kube
from meshplan.planner.emit.serving.job import Argument, PoolProgram, ServingJob
from meshplan.planner.emit.target import Feature
from meshplan.planner.serving.problem.config import Role, Router

TARGET = "kserve"
FILE = "llminferenceservice.yaml"
_MODEL = "/mnt/models"  # where KServe mounts what model.uri names
_ENGINE = "vllm"
# KServe's pool reaches servers here; under disaggregation a sidecar of its own stands before decode servers.
_PORT, _PORT_BEHIND_SIDECAR = 8000, 8001
ROUTER_NOTE = "KServe's scheduler weighs load and cached prefixes; the plan's router policy is not passed to it."


def wrap(job: ServingJob) -> EmittedPlan:
    """``llminferenceservice.yaml``.

    Raises:
        CannotExpressError: another engine than vLLM, a model that is no URI or Hugging Face name, a router that takes
            turns, or a worker whose hosts are neither stages nor data-parallel groups.
    """
    kube.refuse_places(job, TARGET)
    kube.refuse_mooncake(job, TARGET)
    if job.target != _ENGINE:
        raise CannotExpressError(TARGET, f"the engine {job.target}", "a plan for vllm, or target lws")
    if job.router is not None and job.request.config.router is Router.ROUND_ROBIN:
        raise CannotExpressError(TARGET, "a router that takes turns", "router least_loaded or prefix_aware")
    programs = {program.pool.role: program for program in job.programs}
    main = programs.get(Role.MIXED) or programs[Role.DECODE]
    spec: dict[str, Any] = {
        "model": {"uri": kube.model_uri(job, TARGET), "name": job.request.model},
        **_workload(job, main),
    }
    if Role.PREFILL in programs:
        spec["prefill"] = _workload(job, programs[Role.PREFILL])
    spec["router"] = {"gateway": {}, "route": {}, "scheduler": {}}
    service = {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": kube.metadata(job, kube.object_name(job)),
        "spec": spec,
    }
    return kube.emitted(job, target=TARGET, file=FILE, objects=[service], more=(ROUTER_NOTE,), loads=False)


def _workload(job: ServingJob, program: PoolProgram) -> dict[str, Any]:
    """Replicas, degrees and pods of one pool."""
    port = _PORT_BEHIND_SIDECAR if program.pool.role is Role.DECODE else _PORT
    values = kube.placeholders(head="$(LWS_LEADER_ADDRESS)", node_rank="$(LWS_WORKER_INDEX)", port=port)
    made = {
        "replicas": program.pool.num_workers,
        "parallelism": _parallelism(program),
        "template": _pod(job, program, values, head=True),
    }
    if program.num_nodes > 1:
        made["worker"] = _pod(job, program, values, head=False)
    return made


def _parallelism(program: PoolProgram) -> dict[str, Any]:
    layout, nodes = program.pool.layout, program.num_nodes
    parallelism: dict[str, Any] = {"tensor": layout.tensor_parallel * layout.context_parallel}
    data = layout.attention_data_parallel
    if data > 1 and layout.pipeline_parallel > 1:
        raise CannotExpressError(
            TARGET,
            "stages and data-parallel ranks in one worker: KServe takes one or the other",
            "target lws or dynamo",
        )
    if nodes > 1 and data % nodes == 0:
        parallelism |= {"data": data, "dataLocal": data // nodes}
    elif nodes > 1 and (data > 1 or layout.pipeline_parallel != nodes):
        raise CannotExpressError(
            TARGET,
            f"a worker of {nodes} hosts with {layout.pipeline_parallel} stages and {data} data-parallel ranks",
            "one stage per host, or data-parallel ranks that are split evenly over hosts",
        )
    elif data > 1:
        parallelism |= {"data": data, "dataLocal": data}
    if layout.pipeline_parallel > 1:
        parallelism["pipeline"] = layout.pipeline_parallel
    if layout.expert_parallel > 1:
        parallelism["expert"] = True
    return parallelism


def _pod(job: ServingJob, program: PoolProgram, values: dict[str, str], *, head: bool) -> dict[str, Any]:
    model = job.request.model
    arguments: list[Argument] = [_MODEL if part == model else part for part in program.command(head=head)]
    arguments += ["--served-model-name", model]
    node = kube.container(job, program, arguments, values, ready=head, loads=False)
    return {"containers": [node], "volumes": kube.volumes(job)}


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    pods = "pods: types of kubeflow-trainer-api; the service's own fields: golden only"
    return (
        Feature(name="workers", expressed_by="replicas; prefill.replicas", verified_by=pods),
        Feature(
            name="hosts",
            expressed_by="parallelism {tensor, pipeline, data, dataLocal, expert}, template, worker; vLLM only",
            verified_by=pods,
        ),
        Feature(name="configuration", expressed_by="vLLM's own arguments", verified_by="as vllm's"),
    )
