"""A stored diffusion plan as launcher files: the model as the plan carries it, the device from the catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan.catalogs.errors import EmitError
from meshplan.planner.emit import xdit
from meshplan.planner.launch.registry import refuse_devices
from meshplan.planner.launch.serving import host_type

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.emit.artifact import EmitOptions, EmittedPlan


def target(plan: Plan) -> str | None:
    """The engine that the plan was made for."""
    return xdit.TARGET if plan.config else None


def files(plan: Plan, target_name: str, catalog: Catalog, options: EmitOptions) -> EmittedPlan:
    """Launcher files of a diffusion plan, in memory; see :func:`meshplan.planner.service.emit_plan`.

    Raises:
        EmitError: no configuration, another target than xDiT, or an option that it does not take.
    """
    if not plan.config:
        raise EmitError(f"plan {plan.plan_id} found no configuration to launch")
    if target_name != xdit.TARGET:
        raise EmitError(f"target {target_name} does not launch diffusion plans; targets that do: {xdit.TARGET}")
    for name in ("framework", "framework_version", "script", "image", "pod_resources"):
        if getattr(options, name):
            raise EmitError(f"target {xdit.TARGET} takes no --{name.replace('_', '-')}; leave it out")
    hosts = host_type(str(plan.provenance["node_type"]), catalog, plan.spec["cluster"])
    refuse_devices(xdit.TARGET, (hosts.device,))
    request = xdit.XditRequest(
        plan=plan,
        model=plan.provenance["model"],
        job=plan.provenance["job"],
        device=hosts.device,
        devices_per_host=hosts.devices_per_host,
        model_path=options.model_path,
    )
    return xdit.emit(request)
