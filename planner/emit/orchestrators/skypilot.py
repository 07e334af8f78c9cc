"""A job as a SkyPilot task: ``sky launch task.yaml`` in the output folder, which becomes the working directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.hardware import Device
from meshplan.planner.emit.artifact import Artifact, EmittedPlan, ParserVerified, commented, stamp
from meshplan.planner.emit.hosts import refuse_named_hosts, refuse_types
from meshplan.planner.emit.orchestrators import kubernetes
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training import readme, torchrun
from meshplan.planner.emit.training.job import Job

TARGET = "skypilot"
FILE = PurePosixPath("task.yaml")
VERIFIED = ParserVerified(
    framework="skypilot", version="0.14.1", mode="Task.from_yaml; accelerators that no cloud has would pass"
)
# SkyPilot's names (docs.skypilot.co, "sky show-gpus"), by the catalog's.
_ACCELERATORS = {
    "a100-sxm-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "a10g": "A10G",
    "b200-sxm-180gb": "B200",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "t4": "T4",
    "v100-sxm2-16gb": "V100",
    "v100-sxm2-32gb": "V100-32GB",
}
_RUN = """\
export MASTER_ADDR="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"
exec bash ./{launch_script} "$SKYPILOT_NODE_RANK"
"""
START = f"Start with `sky launch {FILE}` in this folder: all of it is copied to every host."
WITHOUT_IMAGE = (
    "task.yaml names no image, and a cloud's own machines hold no {program}: emit again with --image, or install it in "
    "a setup: block."
)
NOTES = (
    "Which machine becomes which host is the cloud's choice.",
    "SkyPilot takes the cheapest cloud that has the accelerators; it knows nothing of the plan's network.",
)


def wrap(job: Job) -> EmittedPlan:
    """``task.yaml`` beside the framework's scripts.

    Raises:
        CannotExpressError: ranks of a host are not consecutive, hosts are named or of several types, or SkyPilot has no
            such accelerator.
        EmitError: no rank table.
    """
    refuse_types(job.request.host_pools, target=TARGET, why="all nodes of a SkyPilot task have the same accelerators")
    refuse_named_hosts(job.request.hosts, job.request.plan.mapping, target=TARGET)
    launch = torchrun.launch_of(job)
    head = commented((*stamp(job.request.plan, job.verified), f"schema: {VERIFIED}"))
    notes = (*(() if job.request.image else (WITHOUT_IMAGE.format(program=job.target),)), *NOTES)
    task = Artifact(path=FILE, content=head + kubernetes.yaml_text(_task(launch)))
    overview = readme.overview(launch, start=START, notes=notes)
    return EmittedPlan(
        target=TARGET,
        artifacts=(overview, task, *kubernetes.mounted_files(launch)),
        parser_verified=VERIFIED,
        notes=(*job.notes, *notes),
    )


def _task(launch: torchrun.Launch) -> dict[str, Any]:
    request = launch.job.request
    resources = task_resources(request.device, kubernetes.devices_per_pod(launch), request.image, TARGET)
    variables = {entry["name"]: entry["value"] for entry in kubernetes.environment(launch, "")}
    del variables["MASTER_ADDR"]  # read from the list of nodes when the task runs
    return {
        "name": kubernetes.object_name(launch),
        "num_nodes": len(launch.placements),
        "resources": resources,
        "workdir": ".",
        "envs": variables,
        "run": _RUN.format(launch_script=torchrun.LAUNCH_SCRIPT),
    }


def task_resources(
    device: Device | None, count: int, image: str, target: str, *, ports: Sequence[int] = ()
) -> dict[str, Any]:
    """``count`` devices of a host, ``ports`` that are opened, and the image where one is named.

    Raises:
        CannotExpressError: SkyPilot has no such accelerator.
    """
    resources: dict[str, Any] = {"accelerators": {accelerator_name(device, target): count}}
    if ports:
        resources["ports"] = list(ports)
    return {**resources, "image_id": f"docker:{image}"} if image else resources


def accelerator_name(device: Device | None, target: str) -> str:
    """SkyPilot's name of a device.

    Raises:
        CannotExpressError: it has none.
    """
    name = None if device is None else _ACCELERATORS.get(device.slug)
    if name is None:
        asked = "an unknown device" if device is None else device.name
        raise CannotExpressError(target, asked, f"a plan on one of {', '.join(_ACCELERATORS)}")
    return name


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (
        Feature(
            name="rank_table",
            expressed_by="node rank = SKYPILOT_NODE_RANK; scattered ranks and named hosts are refused",
            verified_by="read in SkyPilot's documentation",
        ),
        Feature(
            name="hosts",
            expressed_by="num_nodes, resources.accelerators",
            verified_by="SkyPilot's parser (Task.from_yaml)",
        ),
        Feature(
            name="configuration",
            expressed_by="the files of --framework, unchanged, as workdir",
            verified_by="as the framework's",
        ),
    )
