"""What the Kubernetes targets share: files in a ConfigMap, the container of one host, YAML text.

One pod is one host; pod n runs ``launch.sh n``. The files of the job reach it through a ConfigMap, so that the image
needs nothing but the framework. Values are data of a YAML writer, never pasted into text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.untrusted.quoting import QuotingDumper
from meshplan.planner.emit.artifact import Artifact, EmittedPlan, ParserVerified, commented, stamp
from meshplan.planner.emit.hosts import HostPool
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training import readme, torchrun
from meshplan.planner.emit.training.job import Job

MOUNT = "/meshplan"
CONFIG_MAP_LIMIT_BYTES = 2**20  # kubernetes.io/docs/concepts/configuration/configmap: 1 MiB
SCHEMA = ParserVerified(
    framework="kubeflow-trainer-api",
    version="2.3.0",
    mode="types generated from the CRDs, unknown fields refused; no admission webhook, no CEL rule, no cluster",
)
_READ_AND_EXECUTE = 0o555
_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
_SHARED_MEMORY = "shared-memory"
_FILES = "files"

SCHEDULER_NOTE = (
    "Which machine becomes which host is the scheduler's choice. Where the plan depends on it (rail or island order), "
    "name the hosts: the target jobset then pins one pod to each."
)
NETWORK_NOTE = (
    "The pods ask for no RDMA device, so that NCCL would use TCP: emit again with --pod-resource NAME=COUNT, with the "
    "name that your device plugin gives it (rdma/ib, rdma/hca_shared_devices_a, vpc.amazonaws.com/efa …)."
)
NODE_TYPE_LABEL = "meshplan/node-type"
NODE_TYPE_NOTE = (
    f"Each part of the job asks for nodes with the label {NODE_TYPE_LABEL}, because names of node types differ between "
    f"clusters: kubectl label nodes NAME {NODE_TYPE_LABEL}=TYPE, or write the label of your cluster in its place "
    "(node.kubernetes.io/instance-type, nvidia.com/gpu.product)."
)
IMAGE_NOTE = "The image is a placeholder: emit again with --image, or replace it before you apply the file."


class _Dumper(QuotingDumper):
    """Scripts as literal blocks and no anchors, so that a person can read the file and change one place of it."""

    def ignore_aliases(self, data: object) -> bool:
        """What stands twice is written twice."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def documents(launch: torchrun.Launch, path: PurePosixPath, objects: Sequence[dict[str, Any]]) -> Artifact:
    """One YAML file with ``objects``."""
    lines = stamp(launch.job.request.plan, launch.job.verified)
    return yaml_file(path, (*lines, f"schema: {SCHEMA}"), objects)


def yaml_file(path: PurePosixPath, head: Sequence[str], objects: Sequence[dict[str, Any]]) -> Artifact:
    """One YAML file with ``objects``, under the comment lines ``head``."""
    body = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=False, explicit_start=True)
    return Artifact(path=path, content=commented(head) + body)


def yaml_text(document: dict[str, Any]) -> str:
    """One YAML document, in the order in which it was built."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=False)


def emitted(
    job: Job,
    *,
    target: str,
    objects: Callable[[torchrun.Launch], Sequence[dict[str, Any]]],
    more_notes: Sequence[str] = (),
) -> EmittedPlan:
    """README and ``TARGET.yaml``: the ConfigMap of the job's files, then ``objects``.

    Args:
        job: what runs.
        target: name in the registry.
        objects: launch → what starts its pods.
        more_notes: what the user should know about this target.

    Raises:
        CannotExpressError: ranks of a host are not consecutive, or the files are too large.
        EmitError: no rank table.
    """
    launch = torchrun.launch_of(job)
    path = PurePosixPath(f"{target}.yaml")
    file = documents(launch, path, [config_map(launch, target), *objects(launch)])
    network = network_notes(len(launch.placements), job.request.pod_resources)
    notes = (*image_notes(launch), *network, *(() if job.request.hosts else (SCHEDULER_NOTE,)), *more_notes)
    overview = readme.overview(launch, start=f"Start with `kubectl apply -f {path}`.", notes=notes)
    return EmittedPlan(target=target, artifacts=(overview, file), parser_verified=SCHEMA, notes=(*job.notes, *notes))


def object_name(launch: torchrun.Launch) -> str:
    """Name of every object: letters, digits and dashes, far below the 63 characters of a DNS label."""
    return f"meshplan-{launch.job.request.plan.plan_id}"


def metadata(launch: torchrun.Launch) -> dict[str, Any]:
    """Name and the plan's digest."""
    plan = launch.job.request.plan
    return {"name": object_name(launch), "annotations": {"meshplan/plan-digest": plan.digest}}


def mounted_files(launch: torchrun.Launch) -> tuple[Artifact, ...]:
    """What a pod needs: everything but the scripts of single hosts."""
    scripts = (artifact for artifact in torchrun.scripts(launch) if not torchrun.is_host_script(artifact))
    return (*launch.job.files, *scripts)


def config_map(launch: torchrun.Launch, target: str) -> dict[str, Any]:
    """The job's files as a ConfigMap.

    Raises:
        CannotExpressError: they are larger than Kubernetes takes.
    """
    files = mounted_files(launch)
    size_bytes = sum(len(artifact.content.encode()) for artifact in files)
    if size_bytes > CONFIG_MAP_LIMIT_BYTES:
        raise CannotExpressError(
            target,
            f"files of {size_bytes} bytes in one ConfigMap (limit {CONFIG_MAP_LIMIT_BYTES})",
            "the same plan under --target slurm, which reads its files from a shared folder",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(launch),
        "data": {str(artifact.path): artifact.content for artifact in files},
    }


def image(launch: torchrun.Launch) -> str:
    """The image that was asked for, or a name that shows what has to stand there."""
    return launch.job.request.image or f"registry.invalid/{launch.job.target}:replace-me"


def image_notes(launch: torchrun.Launch) -> tuple[str, ...]:
    """What is left to the user."""
    return () if launch.job.request.image else (IMAGE_NOTE,)


def environment(launch: torchrun.Launch, master: str) -> list[dict[str, str]]:
    """Variables of the container: where the first host is, and what the framework asks for without a default."""
    required = [setting for setting in launch.job.settings if setting.required]
    return [
        {"name": "MASTER_ADDR", "value": master},
        {"name": "MASTER_PORT", "value": str(launch.job.request.master_port)},
        *({"name": setting.name, "value": f"/opt/{setting.name.lower().replace('_', '-')}"} for setting in required),
    ]


def devices_per_pod(launch: torchrun.Launch) -> int:
    """All devices of a host: only then are a pod's device numbers those of the host, which the rank table names."""
    highest = max(device for _, device in launch.job.rank_table)
    return launch.job.request.devices_per_host or 1 + highest


def resources(launch: torchrun.Launch, pool: HostPool | None = None) -> dict[str, Any]:
    """Devices of one pod, on a host of ``pool`` where hosts are of several types."""
    request = launch.job.request
    if pool is not None:
        return device_limits(pool.device, pool.devices_per_host, request.pod_resources)
    return device_limits(request.device, devices_per_pod(launch), request.pod_resources)


def device_limits(device: Device | None, count: int, more: Mapping[str, int]) -> dict[str, Any]:
    """``count`` devices of a type (NVIDIA's where the type is unknown) and ``more`` resources, such as RDMA devices."""
    name = _RESOURCES.get(device.vendor if device is not None else "nvidia", "nvidia.com/gpu")
    return {"limits": {name: str(count), **{other: str(number) for other, number in more.items()}}}


def locked_memory(more: Mapping[str, int]) -> dict[str, Any]:
    """What a container with RDMA devices needs: it registers memory, which must be locked."""
    return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if more else {}


def network_notes(num_pods: int, more: Mapping[str, int]) -> tuple[str, ...]:
    """Pods reach each other by TCP unless they ask for the network's devices."""
    return (NETWORK_NOTE,) if num_pods > 1 and not more else ()


def command(node_rank: str) -> list[str]:
    """Command of a container; ``node_rank`` is a number, ``$VARIABLE`` of its environment, or a sum of both."""
    return ["bash", "-c", f'exec {MOUNT}/{torchrun.LAUNCH_SCRIPT} "{node_rank}"']


def volumes(launch: torchrun.Launch) -> list[dict[str, Any]]:
    """The job's files, and shared memory for NCCL (a container's default is 64 MiB)."""
    return [
        {"name": _FILES, "configMap": {"name": object_name(launch), "defaultMode": _READ_AND_EXECUTE}},
        {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}},
    ]


def volume_mounts() -> list[dict[str, Any]]:
    """Where :func:`volumes` are seen."""
    return [{"name": _FILES, "mountPath": MOUNT}, {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]  # noqa: S108 - a mount point in a container, not a file here


def job_spec(
    launch: torchrun.Launch,
    *,
    num_pods: int,
    node_rank: str,
    master: str,
    pod: dict[str, Any],
    hosts: HostPool | None = None,
) -> dict[str, Any]:
    """Spec of an Indexed Job whose pods are hosts.

    Args:
        launch: the job.
        num_pods: pods of this Job.
        node_rank: a number, ``$JOB_COMPLETION_INDEX``, which Kubernetes sets in the pods of an Indexed Job, or a sum
            that bash works out (Kubernetes leaves ``$((…))`` as it is, because no variable has such a name).
        master: name of the first host.
        pod: further fields of the pod's spec.
        hosts: their type, where the job has several.
    """
    container = {
        "name": "node",
        "image": image(launch),
        "command": command(node_rank),
        "env": environment(launch, master),
        "ports": [{"containerPort": launch.job.request.master_port, "protocol": "TCP"}],
        "resources": resources(launch, hosts),
        **locked_memory(launch.job.request.pod_resources),
        "volumeMounts": volume_mounts(),
    }
    return {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimit": 0,
        "template": {
            "spec": {**pod, "restartPolicy": "Never", "containers": [container], "volumes": volumes(launch)},
        },
    }


def features(placed_by: str, hosts_by: str) -> tuple[Feature, ...]:
    """Rows of the support matrix of one Kubernetes target."""
    return (
        Feature(name="rank_table", expressed_by=placed_by, verified_by=f"{SCHEMA.framework}: fields and types"),
        Feature(name="hosts", expressed_by=hosts_by, verified_by=f"{SCHEMA.framework}: fields and types"),
        Feature(
            name="configuration",
            expressed_by="the files of --framework, unchanged, in a ConfigMap",
            verified_by="as the framework's",
        ),
    )
