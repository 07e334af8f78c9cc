"""Questions about training and serving; as a library, what a notebook or a service needs from one place.

::

    from meshplan.planner import load_catalog, make_plan

    plan = make_plan("example.yaml", load_catalog())
    print(plan.config["tensor_parallel"], plan.predicted["iteration_s"].value)

Each name is imported when it is first used (PEP 562): importing this package costs neither NumPy nor a solver, and the
folders of the planner, which all lie below it, do not come to depend on one another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.errors import (
        CatalogError,
        EmitError,
        MeshplanError,
        SolverError,
        SpecError,
        StoreError,
    )
    from meshplan.planner.compare import Comparison, compare_plans
    from meshplan.planner.core.plan import Interval, Plan
    from meshplan.planner.emit.artifact import EmittedPlan
    from meshplan.planner.service import (
        emit_plan,
        estimate_plan,
        explain,
        explain_instead,
        load_catalog,
        make_plan,
        plan_target,
        write_files,
    )
    from meshplan.planner.training.lengths.assign import assign_groups, assign_sequences, document_queue

__all__ = [
    "Catalog",
    "CatalogError",
    "Comparison",
    "EmitError",
    "EmittedPlan",
    "Interval",
    "MeshplanError",
    "Plan",
    "SolverError",
    "SpecError",
    "StoreError",
    "assign_groups",
    "assign_sequences",
    "compare_plans",
    "document_queue",
    "emit_plan",
    "estimate_plan",
    "explain",
    "explain_instead",
    "load_catalog",
    "make_plan",
    "plan_target",
    "write_files",
]

_NAMES = {
    "meshplan.catalogs.database.repository": ("Catalog",),
    "meshplan.catalogs.errors": (
        "CatalogError",
        "EmitError",
        "MeshplanError",
        "SolverError",
        "SpecError",
        "StoreError",
    ),
    "meshplan.planner.compare": ("Comparison", "compare_plans"),
    "meshplan.planner.core.plan": ("Interval", "Plan"),
    "meshplan.planner.emit.artifact": ("EmittedPlan",),
    "meshplan.planner.service": (
        "emit_plan",
        "estimate_plan",
        "explain",
        "explain_instead",
        "load_catalog",
        "make_plan",
        "plan_target",
        "write_files",
    ),
    "meshplan.planner.training.lengths.assign": ("assign_groups", "assign_sequences", "document_queue"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
