"""A stored plan of machines at home as launcher files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan.catalogs.errors import EmitError
from meshplan.planner.emit import edge

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.emit.artifact import EmitOptions, EmittedPlan


def target(plan: Plan) -> str | None:
    """The engine that the plan was made for."""
    return str(plan.config["engine"]) if plan.config else None


def files(plan: Plan, target_name: str, catalog: Catalog, options: EmitOptions) -> EmittedPlan:
    """Launcher files, in memory; see :func:`meshplan.planner.service.emit_plan`.

    Raises:
        EmitError: no configuration, another engine than the plan's, or an option that none takes.
    """
    if not plan.config:
        raise EmitError(f"plan {plan.plan_id} found no configuration to launch")
    if target_name != plan.config["engine"]:
        raise EmitError(
            f"plan {plan.plan_id} is of {plan.config['engine']}, not of {target_name}: plan again with "
            f"constraints.engines: [{target_name}]"
        )
    for name in ("framework", "framework_version", "script", "image", "pod_resources"):
        if getattr(options, name):
            raise EmitError(f"target {target_name} takes no --{name.replace('_', '-')}; leave it out")
    return edge.emit(plan, options.model_path)
