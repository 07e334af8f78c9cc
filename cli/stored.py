"""What the commands on finished plans share: from a PLAN argument to the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshplan.catalogs.database.plan_rows import PlanRows
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan


def plan_rows(catalog: Catalog) -> PlanRows:
    """The stored plans of the catalog's database."""
    from meshplan.catalogs.database.plan_rows import PlanRows

    return PlanRows(catalog.engine)


def load_plan(handle: str, catalog: Catalog) -> Plan:
    """The plan that a PLAN argument means.

    Raises:
        StoreError: no such plan.
        SpecError: an unreadable plan file.
    """
    from meshplan.planner import store

    return store.load(handle, plan_rows(catalog))
