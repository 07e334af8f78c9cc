"""A serving plan as LeaderWorkerSets (leaderworkerset.x-k8s.io/v1): one per pool, a group of pods per worker.

The leader of group i is ``NAME-i.NAME``; the controller gives every pod the leader's address and its own number.
"""

from __future__ import annotations

from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.orchestrators import serving_kubernetes as kube
from meshplan.planner.emit.serving.job import PoolProgram, ServingJob
from meshplan.planner.emit.target import Feature
from meshplan.planner.serving.problem.config import Role

TARGET = "lws"
FILE = "lws.yaml"
_LEADER = "leaderworkerset.sigs.k8s.io/worker-index"
_SET = "leaderworkerset.sigs.k8s.io/name"


def wrap(job: ServingJob) -> EmittedPlan:
    """``lws.yaml``: LeaderWorkerSets, the router and the Service of clients.

    Raises:
        CannotExpressError: the plan names hosts or devices, or the head would have to reach the others by MPI.
    """
    kube.refuse_places(job, TARGET)
    addresses: dict[Role, list[str]] = {}
    for program in job.programs:
        name = kube.pool_name(job, program)
        addresses[program.pool.role] = [
            f"{name}-{group}.{name}:{kube.PORT}" for group in range(program.pool.num_workers)
        ]
    objects = [*kube.config_maps(job), *(_set(job, program) for program in job.programs)]
    if job.router is None:
        selector = {_SET: kube.pool_name(job, job.programs[0]), _LEADER: "0"}
        objects.append(kube.service(job, selector, kube.PORT))
    else:
        objects += kube.router_objects(job, addresses)
    return kube.emitted(job, target=TARGET, file=FILE, objects=objects)


def _set(job: ServingJob, program: PoolProgram) -> dict[str, Any]:
    if program.num_nodes > 1 and not program.follower:
        raise CannotExpressError(
            TARGET,
            f"{job.target} over {program.num_nodes} hosts: its head reaches the others by MPI",
            "one host a worker",
        )
    name = kube.pool_name(job, program)
    group: dict[str, Any] = {
        "size": program.num_nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": _template(job, program, head=True),
    }
    group["workerTemplate"] = _template(job, program, head=program.num_nodes == 1)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": kube.metadata(job, name),
        "spec": {"replicas": program.pool.num_workers, "leaderWorkerTemplate": group},
    }


def _template(job: ServingJob, program: PoolProgram, *, head: bool) -> dict[str, Any]:
    values = kube.placeholders(head="$(LWS_LEADER_ADDRESS)", node_rank="$(LWS_WORKER_INDEX)")
    node = kube.container(job, program, program.command(head=head), values, ready=head)
    return {"spec": {"containers": [node], "volumes": kube.volumes(job)}}


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    pods = "pods: types of kubeflow-trainer-api; the set's own fields: golden only"
    return (
        Feature(name="workers", expressed_by="replicas of a LeaderWorkerSet a pool", verified_by=pods),
        Feature(
            name="hosts", expressed_by="size, LWS_LEADER_ADDRESS, LWS_WORKER_INDEX; device limits", verified_by=pods
        ),
        Feature(name="configuration", expressed_by="the engine's own arguments", verified_by="as the engine's"),
    )
