"""A serving plan as a SkyPilot task: the scripts of the engine on every host, the router on the first."""

from __future__ import annotations

from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import EmittedPlan, stamp
from meshplan.planner.emit.orchestrators import kubernetes, serving_kubernetes, skypilot
from meshplan.planner.emit.serving import script as serving_script
from meshplan.planner.emit.serving.job import ServingJob
from meshplan.planner.emit.serving.readme import serving_overview
from meshplan.planner.emit.target import Feature

TARGET = "skypilot-serve"
FILE = skypilot.FILE
VERIFIED = skypilot.VERIFIED
_RUN = """\
export MESHPLAN_HOSTS="$(tr '\\n' ' ' <<< "$SKYPILOT_NODE_IPS")"
{router}exec bash ./{launch} "$SKYPILOT_NODE_RANK"
"""
_ROUTER = """\
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
  bash ./{router} &
fi
"""


def wrap(job: ServingJob) -> EmittedPlan:
    """``task.yaml`` beside the engine's scripts.

    Raises:
        CannotExpressError: hosts of several types, named hosts or devices, or an accelerator that SkyPilot has not.
    """
    serving_kubernetes.refuse_places(job, TARGET)
    request = job.request
    types = sorted({pool.node_type for pool in request.config.pools})
    if len(types) > 1:
        raise CannotExpressError(TARGET, f"hosts of {len(types)} types ({', '.join(types)})", "one type of host")
    hosts = request.host_type(types[0])
    launch = serving_script.launch_of(job)
    resources = skypilot.task_resources(
        hosts.device, hosts.devices_per_host, request.image, TARGET, ports=(request.port,)
    )
    router = "" if job.router is None else _ROUTER.format(router=serving_script.ROUTER_SCRIPT)
    task: dict[str, Any] = {
        "name": serving_kubernetes.object_name(job),
        "num_nodes": launch.num_hosts,
        "resources": resources,
        "workdir": ".",
        "run": _RUN.format(router=router, launch=serving_script.LAUNCH_SCRIPT),
    }
    head = (*stamp(request.plan, job.verified), f"schema: {VERIFIED}")
    return EmittedPlan(
        target=TARGET,
        artifacts=(
            serving_overview(job, num_hosts=launch.num_hosts, start=skypilot.START, notes=skypilot.NOTES),
            kubernetes.yaml_file(FILE, head, [task]),
            *serving_script.scripts(launch),
        ),
        parser_verified=VERIFIED,
        notes=(*job.notes, *skypilot.NOTES),
    )


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (
        Feature(
            name="hosts",
            expressed_by="num_nodes, resources.accelerators; hosts of one type",
            verified_by="SkyPilot's parser (Task.from_yaml)",
        ),
        Feature(name="router", expressed_by="router.sh on the first host", verified_by="as the engine's"),
        Feature(
            name="configuration",
            expressed_by="the engine's scripts, unchanged, as workdir",
            verified_by="as the engine's",
        ),
    )
