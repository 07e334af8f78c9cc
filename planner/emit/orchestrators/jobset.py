"""A job as a Kubernetes JobSet (jobset.x-k8s.io/v1alpha2).

Without host names: one replicated Job with a pod for each host. With host names: one replicated Job for each host,
pinned to its node by the label ``kubernetes.io/hostname``, so that the rank table holds for the machines themselves.
Hosts of several types: one replicated Job for each run of hosts of a type, on nodes with a label of that type.
"""

from __future__ import annotations

from typing import Any

from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.hosts import runs_by_type
from meshplan.planner.emit.orchestrators import kubernetes
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training import torchrun
from meshplan.planner.emit.training.job import Job

TARGET = "jobset"
_GROUP = "node"


def wrap(job: Job) -> EmittedPlan:
    """``jobset.yaml``: ConfigMap and JobSet.

    Raises:
        CannotExpressError: ranks of a host are not consecutive, or the files are too large.
        EmitError: no rank table, or a host without a name.
    """
    notes = (kubernetes.NODE_TYPE_NOTE,) if job.request.host_pools else ()
    return kubernetes.emitted(job, target=TARGET, objects=lambda launch: (_jobset(launch),), more_notes=notes)


def _jobset(launch: torchrun.Launch) -> dict[str, Any]:
    name = kubernetes.object_name(launch)
    hosts = launch.placements
    if launch.job.request.hosts:
        master = f"{name}-{_GROUP}-000-0-0.{name}"
        groups = [
            _replicated_job(
                f"{_GROUP}-{host.node_rank:03d}",
                kubernetes.job_spec(
                    launch,
                    num_pods=1,
                    node_rank=str(host.node_rank),
                    master=master,
                    pod={"nodeSelector": {"kubernetes.io/hostname": host.hostname}},
                ),
            )
            for host in hosts
        ]
    elif launch.job.request.host_pools:
        groups = _groups_by_type(launch, f"{name}-{_GROUP}-000-0-0.{name}")
    else:
        spec = kubernetes.job_spec(
            launch, num_pods=len(hosts), node_rank="$JOB_COMPLETION_INDEX", master=f"{name}-{_GROUP}-0-0.{name}", pod={}
        )
        groups = [_replicated_job(_GROUP, spec)]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": kubernetes.metadata(launch),
        "spec": {
            # Names of pods must resolve before they are ready: the ranks wait for each other while they start.
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": groups,
        },
    }


def _groups_by_type(launch: torchrun.Launch, master: str) -> list[dict[str, Any]]:
    """One replicated Job for each run of hosts of a type; its first pod has the node rank in its name."""
    groups = []
    for pool, run in runs_by_type(launch.placements, launch.job.request.host_pools):
        first = run[0].node_rank
        spec = kubernetes.job_spec(
            launch,
            num_pods=len(run),
            node_rank=f"$(({first} + JOB_COMPLETION_INDEX))",
            master=master,
            pod={"nodeSelector": {kubernetes.NODE_TYPE_LABEL: pool.node_type}},
            hosts=pool,
        )
        groups.append(_replicated_job(f"{_GROUP}-{first:03d}", spec))
    return groups


def _replicated_job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return kubernetes.features(
        "node rank = completion index; named hosts: one replicated Job each; scattered ranks are refused",
        "completions, parallelism, device limits; nodeSelector kubernetes.io/hostname, or the node type",
    )
