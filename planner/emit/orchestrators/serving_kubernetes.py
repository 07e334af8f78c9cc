"""What the Kubernetes targets of serving plans share: containers of an engine's nodes, its router, its files.

One pod is one node of a worker, so ports are the same in each. Texts of the user are data of a YAML writer; what
Kubernetes would expand (``$(…)``) is escaped in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import EmittedPlan, stamp
from meshplan.planner.emit.hosts import refuse_named_hosts
from meshplan.planner.emit.orchestrators import kubernetes
from meshplan.planner.emit.serving.job import HEALTH_PATH, Argument, PoolProgram, RouterProgram, ServingJob, Template
from meshplan.planner.emit.serving.readme import serving_overview
from meshplan.planner.serving.problem.config import KvConnector, Role

PORT = 8100
_FILES = "files"
_PORTS = {
    "internal_port": "20000",
    "rpc_port": "20001",
    "side_port": "20010",
    "bootstrap_port": "20390",
}
PLACE_NOTE = (
    "A pod asks for a number of devices: which machine and which of its devices it gets is the scheduler's choice."
)
HUB_TOKEN = {"name": "hf-token", "key": "token", "optional": True}
GATED_NOTE = (
    "Pods read HF_TOKEN from the secret hf-token where there is one; gated models need it: "
    "kubectl create secret generic hf-token --from-literal=token=…"
)
DOWNLOAD_NOTE = (
    "Every pod downloads the checkpoint when it starts, into its own file system, and is started again where it does "
    "not answer within an hour: mount a volume that holds it, and emit with --model-path."
)
UNCHECKED = (
    "not machine-checked beyond its pods (types of kubeflow-trainer-api 2.3.0) and the engine's arguments "
    "(its own parser)"
)


def refuse_places(job: ServingJob, target: str) -> None:
    """Stop where the plan names hosts. Devices need no names: a pod asks for a number of them.

    Raises:
        CannotExpressError: it does.
    """
    refuse_named_hosts(job.request.hosts, None, target=target)


def refuse_mooncake(job: ServingJob, target: str) -> None:
    """Stop where vLLM's caches are moved by what an orchestrator's own proxy does not ask prefill workers for.

    Raises:
        CannotExpressError: they are.
    """
    config = job.request.config
    if job.target == "vllm" and config.is_disaggregated and config.kv_connector is KvConnector.MOONCAKE:
        what = "KV caches that Mooncake moves (how it routes requests was read for NIXL alone)"
        raise CannotExpressError(target, what, "kv_connector nixl, or target lws")


def model_uri(job: ServingJob, target: str) -> str:
    """Where the weights come from, as a URI.

    Raises:
        CannotExpressError: from a folder.
    """
    model = job.request.model
    if "://" in model:
        return model
    if model.startswith((".", "/")):
        raise CannotExpressError(target, f"the folder {model!r}", "a Hugging Face name, or a URI such as pvc://…")
    return f"hf://{model}"


def object_name(job: ServingJob) -> str:
    """Name of every object."""
    return f"meshplan-{job.request.plan.plan_id}"


def pool_name(job: ServingJob, program: PoolProgram) -> str:
    """Name of a pool's objects."""
    return f"{object_name(job)}-{program.name}"


def metadata(job: ServingJob, name: str) -> dict[str, Any]:
    """Name and the plan's digest."""
    return {"name": name, "annotations": {"meshplan/plan-digest": job.request.plan.digest}}


def placeholders(*, head: str, node_rank: str, port: int = PORT) -> dict[str, str]:
    """Values of the placeholders in the arguments of a node."""
    return {
        **_PORTS,
        "port": str(port),
        "head": head,
        "own": "$(POD_IP)",
        "node_rank": node_rank,
        "files": kubernetes.MOUNT,
    }


def text(argument: Argument, values: Mapping[str, str]) -> str:
    """An argument as Kubernetes takes it: placeholders filled, everything else literal."""
    return argument.filled(values) if isinstance(argument, Template) else argument.replace("$(", "$$(")


def container(
    job: ServingJob,
    program: PoolProgram,
    arguments: Sequence[Argument],
    values: Mapping[str, str],
    *,
    ready: bool,
    loads: bool = True,
) -> dict[str, Any]:
    """One node of a worker.

    Args:
        job: what is served.
        program: the pool.
        arguments: the command.
        values: of :func:`placeholders`.
        ready: it answers requests: a probe waits for it.
        loads: it fetches the weights itself, which KServe does for its pods.
    """
    request = job.request
    device = request.host_type(program.pool.node_type).device
    share = program.pool.layout.num_devices // program.num_nodes
    made: dict[str, Any] = {
        "name": "main",
        "image": image(job),
        "command": [text(argument, values) for argument in arguments],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *(_hub_token(job) if loads else ()),
            *({"name": name, "value": text(argument, values)} for name, argument in program.environment.items()),
        ],
        "resources": kubernetes.device_limits(device, share, request.pod_resources),
        **kubernetes.locked_memory(request.pod_resources),
        "volumeMounts": kubernetes.volume_mounts() if job.files else kubernetes.volume_mounts()[1:],
    }
    if ready:
        port = int(values["port"])
        made["ports"] = [{"containerPort": port, "protocol": "TCP"}]
        asked = {"httpGet": {"path": HEALTH_PATH, "port": port}, "periodSeconds": 10}
        # Loading may take an hour; only then a server that does not answer is taken off, and later restarted.
        made["startupProbe"] = {**asked, "failureThreshold": 360}
        made["readinessProbe"] = {**asked, "failureThreshold": 3}
        made["livenessProbe"] = {**asked, "failureThreshold": 12}
    return made


def _hub_token(job: ServingJob) -> list[dict[str, Any]]:
    """The token of Hugging Face that gated models need (Llama, Gemma), where weights come from there."""
    if "://" in job.request.model or job.request.model.startswith((".", "/")):
        return []
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": HUB_TOKEN}}]


def volumes(job: ServingJob) -> list[dict[str, Any]]:
    """The job's files, where it has some, and shared memory for NCCL."""
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    return [{"name": _FILES, "configMap": {"name": object_name(job)}}, shared] if job.files else [shared]


def config_maps(job: ServingJob) -> list[dict[str, Any]]:
    """The job's files; none where it has none."""
    if not job.files:
        return []
    data = {str(artifact.path): artifact.content for artifact in job.files}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, object_name(job)), "data": data}]


def router_objects(job: ServingJob, addresses: Mapping[Role, Sequence[str]]) -> list[dict[str, Any]]:
    """Deployment of the router and the Service that clients talk to; only the Service where there is no router.

    Args:
        job: what is served.
        addresses: ``host:port`` of the workers by role.
    """
    name = f"{object_name(job)}-router"
    port = job.request.port
    if job.router is None:
        return []
    router: RouterProgram = job.router(addresses)
    labels = {"app": name}
    values = {"router_file": f"{kubernetes.MOUNT}/{router.file[0]}" if router.file else "", **_bootstrap(addresses)}
    made: dict[str, Any] = {
        "name": "main",
        "image": image(job),
        "command": [text(argument, values) for argument in router.command],
        "ports": [{"containerPort": port, "protocol": "TCP"}],
    }
    pod: dict[str, Any] = {"containers": [made]}
    objects: list[dict[str, Any]] = []
    if router.file is not None:
        data = {router.file[0]: router.file[1].filled(values)}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, name), "data": data})
        made["volumeMounts"] = [{"name": _FILES, "mountPath": kubernetes.MOUNT}]
        pod["volumes"] = [{"name": _FILES, "configMap": {"name": name}}]
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return [
        *objects,
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata(job, name), "spec": deployment},
        service(job, labels, port),
    ]


def service(job: ServingJob, selector: Mapping[str, str], target_port: int) -> dict[str, Any]:
    """What clients talk to."""
    ports = [{"port": job.request.port, "targetPort": target_port, "protocol": "TCP"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, object_name(job)),
        "spec": {"selector": dict(selector), "ports": ports},
    }


def _bootstrap(addresses: Mapping[Role, Sequence[str]]) -> dict[str, str]:
    return {
        f"bootstrap_port_{number}": _PORTS["bootstrap_port"] for number in range(len(addresses.get(Role.PREFILL, ())))
    }


def image(job: ServingJob) -> str:
    """The image that was asked for, or a name that shows what has to stand there."""
    return job.request.image or f"registry.invalid/{job.target}:replace-me"


def notes(job: ServingJob, *, loads: bool = True) -> tuple[str, ...]:
    """What is left to the user; ``loads`` as for :func:`container`."""
    # Prefill workers send their KV cache over the same network.
    pods = max(program.num_nodes for program in job.programs) + job.request.config.is_disaggregated
    image_note = () if job.request.image else (kubernetes.IMAGE_NOTE,)
    gated = (GATED_NOTE, DOWNLOAD_NOTE) if loads and _hub_token(job) else ()
    return (PLACE_NOTE, *image_note, *kubernetes.network_notes(pods, job.request.pod_resources), *gated)


def emitted(
    job: ServingJob,
    *,
    target: str,
    file: str,
    objects: Sequence[dict[str, Any]],
    more: Sequence[str] = (),
    loads: bool = True,
) -> EmittedPlan:
    """README and one YAML file; ``loads`` as for :func:`container`."""
    listed = (*notes(job, loads=loads), *more)
    overview = serving_overview(job, num_hosts=0, start=f"Start with `kubectl apply -f {file}`.", notes=listed)
    head = (*stamp(job.request.plan, job.verified), f"schema: {UNCHECKED}")
    return EmittedPlan(
        target=target,
        artifacts=(overview, kubernetes.yaml_file(PurePosixPath(file), head, objects)),
        parser_verified=job.verified,
        notes=(*job.notes, *listed),
    )
