"""What the commands on finished plans share: from a PLAN argument to the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan.catalogs.errors import CatalogError
from meshplan.cli.database import warn

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


def check_tag(tag: str | None, catalog: Catalog) -> None:
    """Refuse a tag before a plan is looked for: a long search would end without being stored.

    Raises:
        StoreError: no plan may have it.
    """
    if tag is not None and catalog.engine.url.database is not None:
        plan_rows(catalog).check_tag(tag)


def save_plan(made: Plan, catalog: Catalog, *, name: str = "", tag: str | None = None) -> bool:
    """Whether the plan could be stored; where not, a warning says why."""
    from meshplan.planner import store

    if catalog.engine.url.database is None:
        return False  # of the shipped numbers only; that has been said
    try:
        store.save(made, plan_rows(catalog), name=name, tag=tag)
    except CatalogError as error:
        warn(f"the plan is not stored: {error}; keep it as a file with --out DIR, or --format json > plan.json")
        return False
    return True
