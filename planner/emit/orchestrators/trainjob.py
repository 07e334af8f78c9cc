"""A job as a Kubeflow TrainJob (trainer.kubeflow.org/v1alpha1) on the runtime ``torch-distributed``.

The runtime sets ``PET_NODE_RANK`` and ``PET_MASTER_ADDR``, torchrun's variables, from the pod's index. The launch
script passes the same values as flags, which take precedence, and adds what no variable carries: the order of each
host's devices.
"""

from __future__ import annotations

from typing import Any

from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.hosts import refuse_named_hosts, refuse_types
from meshplan.planner.emit.orchestrators import kubernetes
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training import torchrun
from meshplan.planner.emit.training.job import Job

TARGET = "trainjob"
RUNTIME = "torch-distributed"
_NODE = "node"  # replicated Job and container of that runtime


def wrap(job: Job) -> EmittedPlan:
    """``trainjob.yaml``: ConfigMap and TrainJob.

    Raises:
        CannotExpressError: ranks of a host are not consecutive, hosts are named or of several types, or the files are
            too large.
        EmitError: no rank table.
    """
    refuse_types(job.request.host_pools, target=TARGET, why="resourcesPerNode is that of every node")
    refuse_named_hosts(job.request.hosts, job.request.plan.mapping, target=TARGET)
    note = f"The runtime {RUNTIME} must be installed in the cluster (it comes with Kubeflow Trainer)."
    return kubernetes.emitted(job, target=TARGET, objects=lambda launch: (_train_job(launch),), more_notes=(note,))


def _train_job(launch: torchrun.Launch) -> dict[str, Any]:
    sizes = {len(host.devices) for host in launch.placements}
    start = (
        f'export MASTER_ADDR="$PET_MASTER_ADDR"\nexec {kubernetes.MOUNT}/{torchrun.LAUNCH_SCRIPT} "$PET_NODE_RANK"\n'
    )
    trainer: dict[str, Any] = {
        "image": kubernetes.image(launch),
        "command": ["bash", "-c"],
        "args": [start],
        # The runtime knows the first host's name; everything else is as in the other Kubernetes targets.
        "env": [entry for entry in kubernetes.environment(launch, "") if entry["name"] != "MASTER_ADDR"],
        "numNodes": len(launch.placements),
        "resourcesPerNode": kubernetes.resources(launch),
    }
    if len(sizes) == 1:
        trainer["numProcPerNode"] = sizes.pop()
    pod = {
        "volumes": kubernetes.volumes(launch),
        "containers": [{"name": _NODE, "volumeMounts": kubernetes.volume_mounts()}],
    }
    job_patch = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"manager": "meshplan", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job_patch]}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": kubernetes.metadata(launch),
        "spec": {"runtimeRef": {"name": RUNTIME}, "trainer": trainer, "runtimePatches": [patch]},
    }


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return kubernetes.features(
        "node rank = PET_NODE_RANK of the runtime; scattered ranks and named hosts are refused",
        "numNodes, numProcPerNode (equal hosts), resourcesPerNode",
    )
