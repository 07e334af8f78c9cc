"""A job as a plain Kubernetes Job with a headless Service, for clusters without JobSet."""

from __future__ import annotations

from typing import Any

from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.hosts import refuse_named_hosts, refuse_types
from meshplan.planner.emit.orchestrators import kubernetes
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training import torchrun
from meshplan.planner.emit.training.job import Job

TARGET = "job"


def wrap(job: Job) -> EmittedPlan:
    """``job.yaml``: ConfigMap, Service and Job.

    Raises:
        CannotExpressError: ranks of a host are not consecutive, hosts are named or of several types, or the files are
            too large.
        EmitError: no rank table.
    """
    refuse_types(job.request.host_pools, target=TARGET, why="one template makes all pods of a Job")
    refuse_named_hosts(job.request.hosts, job.request.plan.mapping, target=TARGET)
    return kubernetes.emitted(job, target=TARGET, objects=lambda launch: (_service(launch), _job(launch)))


def _service(launch: torchrun.Launch) -> dict[str, Any]:
    """Gives the pods names; the ranks wait for each other while they start, so names come before readiness."""
    name = kubernetes.object_name(launch)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": kubernetes.metadata(launch),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }


def _job(launch: torchrun.Launch) -> dict[str, Any]:
    name = kubernetes.object_name(launch)
    spec = kubernetes.job_spec(
        launch,
        num_pods=len(launch.placements),
        node_rank="$JOB_COMPLETION_INDEX",
        master=f"{name}-0.{name}",
        pod={"subdomain": name},
    )
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": kubernetes.metadata(launch), "spec": spec}


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return kubernetes.features(
        "node rank = completion index; scattered ranks and named hosts are refused",
        "completions, parallelism, device limits",
    )
