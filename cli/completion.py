"""Names that the shell completes: models, GPUs and node types, stored plans, targets.

Called by the shell while a command line is typed, so that nothing may be printed and no error may leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from meshplan.catalogs.errors import MeshplanError


def complete_model(incomplete: str) -> list[str]:
    """Models of the catalog."""
    return _found(incomplete, _models)


def complete_gpus(incomplete: str) -> list[str]:
    """Node types and devices after a count: ``16xh`` → ``16xh100-sxm-80gb``, ``16xh20-96gb``."""
    done, comma, last = incomplete.rpartition(",")
    count, mark, name = last.partition("x")
    if not count.strip().isdigit():
        return []
    return [f"{done}{comma}{count}{mark}{one}" for one in _found(name, _hardware)]


def complete_plan(incomplete: str) -> list[str]:
    """Tags and ids of stored plans, newest first."""
    return _found(incomplete, _plans)


def complete_target(incomplete: str) -> list[str]:
    """What a plan can be written for."""
    return _found(incomplete, _targets)


def _found(incomplete: str, names: Callable[[], Sequence[str]]) -> list[str]:
    with suppress(MeshplanError, OSError):
        return [name for name in names() if name.lower().startswith(incomplete.lower())]
    return []


# Each imports what it needs when it is called: a shell that completes options must not wait for SQLAlchemy.


def _models() -> list[str]:
    from meshplan.catalogs.database.repository import Catalog

    return [str(row["slug"]) for row in Catalog.open(None).models()]


def _hardware() -> list[str]:
    from meshplan.catalogs.database.repository import Catalog

    catalog = Catalog.open(None)
    return [device.slug for device in catalog.devices()] + [node.slug for node in catalog.node_types()]


def _plans() -> list[str]:
    from meshplan.catalogs.database.plan_rows import PlanRows
    from meshplan.catalogs.database.repository import Catalog

    rows = PlanRows(Catalog.open(None).engine).list()
    return ["latest", *(row.tag for row in rows if row.tag), *(row.plan_id for row in rows)]


def _targets() -> list[str]:
    from meshplan.planner.emit import edge, xdit
    from meshplan.planner.launch.registry import TARGETS

    return [*(target.name for target in TARGETS), xdit.TARGET, *edge.TARGETS]
