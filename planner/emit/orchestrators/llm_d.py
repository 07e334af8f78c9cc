"""A serving plan as values of llm-d's Helm chart ``llm-d-modelservice``, for vLLM: one role a pool.

The chart makes a Deployment of each role, or a LeaderWorkerSet where a worker spans hosts, and puts llm-d's routing
sidecar before decode servers; requests are scheduled by the InferencePool that selects the pods' labels. All pods of a
LeaderWorkerSet have one command there, so it asks for its own number. Values: charts/llm-d-modelservice/values.yaml and
templates/_helpers.tpl of llm-d-incubation/llm-d-modelservice.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import EmittedPlan, stamp
from meshplan.planner.emit.orchestrators import kubernetes
from meshplan.planner.emit.orchestrators import serving_kubernetes as kube
from meshplan.planner.emit.serving.job import PoolProgram, ServingJob
from meshplan.planner.emit.serving.readme import serving_overview
from meshplan.planner.emit.target import Feature
from meshplan.planner.serving.problem.config import Role, Router

TARGET = "llm-d"
FILE = PurePosixPath("values.yaml")
_ENGINE = "vllm"
_CHART = "llm-d-modelservice/llm-d-modelservice"
_SERVICE_PORT, _PORT_BEHIND_SIDECAR = 8000, 8200  # routing.servicePort and routing.proxy.targetPort of the chart
_CONNECTOR = "nixlv2"
# $1: how many of the arguments after it are the head's command; the rest is that of the other nodes.
_CHOOSE = 'n=$1; shift; if [ "$LWS_WORKER_INDEX" = 0 ]; then exec "${@:1:n}"; else exec "${@:n+1}"; fi'
SCHEDULER_NOTE = (
    "llm-d's scheduler weighs load and cached prefixes; the plan's router policy is not passed to it. Install an "
    "InferencePool that selects the pods' labels."
)
_UNCHECKED = "not rendered by Helm; names and types of the values are those of the chart's own schema"


def wrap(job: ServingJob) -> EmittedPlan:
    """``values.yaml``.

    Raises:
        CannotExpressError: another engine than vLLM, a model that is neither a Hugging Face name nor a URI, a router
            that takes turns, or named hosts.
    """
    kube.refuse_places(job, TARGET)
    kube.refuse_mooncake(job, TARGET)
    if job.target != _ENGINE:
        raise CannotExpressError(TARGET, f"the engine {job.target}", "a plan for vllm, or target lws")
    if "{{" in job.request.model:
        raise CannotExpressError(TARGET, "a model whose name the chart would take for a template", "another name")
    if job.router is not None and job.request.config.router is Router.ROUND_ROBIN:
        raise CannotExpressError(TARGET, "a router that takes turns", "router least_loaded or prefix_aware")
    notes = (*kube.notes(job), SCHEDULER_NOTE)
    name = kube.object_name(job)
    start = (
        "Start with `helm repo add llm-d-modelservice https://llm-d-incubation.github.io/llm-d-modelservice/` and "
        f"`helm install {name} {_CHART} --values {FILE}`."
    )
    head = (*stamp(job.request.plan, job.verified), f"schema: {_UNCHECKED}")
    return EmittedPlan(
        target=TARGET,
        artifacts=(
            serving_overview(job, num_hosts=0, start=start, notes=notes),
            kubernetes.yaml_file(FILE, head, [_values(job)]),
        ),
        parser_verified=job.verified,
        notes=(*job.notes, *notes),
    )


def _values(job: ServingJob) -> dict[str, Any]:
    programs = {program.pool.role: program for program in job.programs}
    main = programs.get(Role.MIXED) or programs[Role.DECODE]
    device = job.request.host_type(main.pool.node_type).device
    name, is_disaggregated = kube.object_name(job), Role.PREFILL in programs
    return {
        "fullnameOverride": name,
        "multinode": any(program.num_nodes > 1 for program in job.programs),
        "accelerator": {"type": "nvidia" if device is None else device.vendor},
        "modelArtifacts": {
            "name": job.request.model,
            "uri": kube.model_uri(job, TARGET),
            "labels": {"llm-d.ai/inferenceServing": "true", "llm-d.ai/model": name},
        },
        "routing": {
            "servicePort": _SERVICE_PORT,
            "proxy": {"enabled": is_disaggregated, "targetPort": _PORT_BEHIND_SIDECAR, "connector": _CONNECTOR},
        },
        "decode": _role(job, main, port=_PORT_BEHIND_SIDECAR if is_disaggregated else _SERVICE_PORT),
        "prefill": _role(job, programs[Role.PREFILL], port=_SERVICE_PORT) if is_disaggregated else {"create": False},
    }


def _role(job: ServingJob, program: PoolProgram, *, port: int) -> dict[str, Any]:
    layout, nodes = program.pool.layout, program.num_nodes
    values = kube.placeholders(head="$(LWS_LEADER_ADDRESS)", node_rank="$(LWS_WORKER_INDEX)", port=port)
    commands = [[kube.text(part, values) for part in program.command(head=head)] for head in (True, False)]
    node = kube.container(job, program, program.command(head=True), values, ready=nodes == 1)
    first, *arguments = commands[0]
    if nodes > 1:
        first, arguments = "bash", ["-c", _CHOOSE, "bash", str(len(commands[0])), *commands[0], *commands[1]]
    probes = {name: node.pop(name) for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in node}
    container = {
        **node,
        "name": _ENGINE,
        "modelCommand": "custom",
        "command": [first],
        "args": arguments,
        # Without limits the chart counts tensor × local data ranks, and forgets stages.
        "resources": {**node["resources"], "requests": dict(node["resources"]["limits"])},
        "mountModelVolume": False,
    }
    if probes:
        container["extraConfig"] = probes
    return {
        "create": True,
        "replicas": program.pool.num_workers,
        "parallelism": {
            "tensor": layout.tensor_parallel * layout.context_parallel,
            "data": layout.attention_data_parallel,
            "dataLocal": max(1, layout.attention_data_parallel // nodes),
            "workers": nodes,
        },
        "containers": [container],
        "volumes": kube.volumes(job),
    }


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (
        Feature(name="workers", expressed_by="decode.replicas, prefill.replicas", verified_by="the chart's schema"),
        Feature(
            name="hosts",
            expressed_by="multinode, parallelism.workers, device limits; vLLM only",
            verified_by="the chart's schema",
        ),
        Feature(name="configuration", expressed_by="vLLM's own arguments", verified_by="as vllm's"),
    )
