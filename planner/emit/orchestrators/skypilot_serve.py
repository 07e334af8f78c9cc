"""A serving plan as a SkyPilot task: the scripts of the engine on every host, the router on the first."""

from __future__ import annotations

from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.untrusted.quoting import shell_word
from meshplan.planner.emit.artifact import EmittedPlan, stamp
from meshplan.planner.emit.orchestrators import kubernetes, serving_kubernetes, skypilot
from meshplan.planner.emit.releases import release_of
from meshplan.planner.emit.serving import script as serving_script
from meshplan.planner.emit.serving import sglang, vllm
from meshplan.planner.emit.serving.job import ServingJob
from meshplan.planner.emit.serving.readme import serving_overview
from meshplan.planner.emit.target import Feature
from meshplan.planner.serving.problem.config import Router

TARGET = "skypilot-serve"
FILE = skypilot.FILE
VERIFIED = skypilot.VERIFIED
# Engines that pip installs whole, and their routers; TensorRT-LLM asks for a system's MPI, too.
_ROUTERS = {"vllm": vllm.ROUTER_VERIFIED, "sglang": sglang.ROUTER_VERIFIED}
# What moves caches between prefill and decode workers.
_TRANSFER = "nixl"
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
        **_setup(job),
        "run": _RUN.format(router=router, launch=serving_script.LAUNCH_SCRIPT),
    }
    without = (
        () if request.image or "setup" in task else (skypilot.WITHOUT_IMAGE.format(program=request.config.engine),)
    )
    notes = (*without, *skypilot.NOTES)
    head = (*stamp(request.plan, job.verified), f"schema: {VERIFIED}")
    return EmittedPlan(
        target=TARGET,
        artifacts=(
            serving_overview(job, num_hosts=launch.num_hosts, start=skypilot.START, notes=notes),
            kubernetes.yaml_file(FILE, head, [task]),
            *serving_script.scripts(launch),
        ),
        parser_verified=VERIFIED,
        notes=(*job.notes, *notes),
    )


def _setup(job: ServingJob) -> dict[str, str]:
    """What installs the engine and its router on a cloud's own machine; an image holds them."""
    request = job.request
    engine = request.config.engine
    if request.image or engine not in _ROUTERS or job.verified is None:
        return {}
    packages = [f"{engine}=={release_of(engine, request.framework_version) or job.verified.version}"]
    if job.router is not None and request.config.router is not Router.LEAST_CONNECTIONS:  # that is nginx
        packages.append(f"{_ROUTERS[engine].framework}=={_ROUTERS[engine].version}")
    if request.config.is_disaggregated:
        packages.append(_TRANSFER)
    return {"setup": f"pip install {' '.join(map(shell_word, packages))}\n"}


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
