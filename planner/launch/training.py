"""A stored training plan as a request to the emitters: the device's name and memory from the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import EmitError, UnknownEntryError
from meshplan.planner.core.plan import shape_from_document
from meshplan.planner.emit.artifact import EmitOptions
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch.registry import emit, is_orchestrator
from meshplan.planner.training.problem.spec import ConstraintsSpec

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.hardware import Device
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.emit.artifact import EmittedPlan


def target(plan: Plan) -> str | None:
    """The framework that the plan was made for."""
    return ConstraintsSpec.model_validate(plan.spec.get("constraints", {})).target


def files(plan: Plan, target_name: str, catalog: Catalog, options: EmitOptions) -> EmittedPlan:
    """Launcher files of a training plan, in memory; see :func:`meshplan.planner.service.emit_plan`."""
    framework = options.framework
    if framework is None and is_orchestrator(target_name):
        framework = target(plan)
    if "model" not in plan.provenance:
        raise EmitError(f"plan {plan.plan_id} of the kind {plan.kind!r} has no configuration to launch")
    device, devices_per_host = _hardware(plan.spec, catalog)
    request = TrainingRequest(
        plan=plan,
        shape=shape_from_document(plan.provenance["model"]),
        device=device,
        devices_per_host=devices_per_host,
        hosts=tuple((plan.mapping or {}).get("hosts", ())),
        script=options.script,
        image=options.image,
        pod_resources=options.pod_resources,
    )
    return emit(target_name, request, framework=framework)


def _hardware(spec: Mapping[str, Any], catalog: Catalog) -> tuple[Device | None, int]:
    """The accelerator of a training spec and how many a host has; None and 0 where the catalog does not say."""
    cluster = spec["cluster"]
    try:
        if cluster.get("nodes"):
            node = catalog.node_type(cluster["nodes"][0]["type"])
            return node.device, node.devices_per_host
        return catalog.device(cluster["devices"]["type"]), 0
    except UnknownEntryError:
        return None, 0
