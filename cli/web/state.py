"""What the application holds: settings, catalog, jobs, and the processes that answer calls."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.database.jobs import Jobs
from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.web.calls import Calls
from meshplan.cli.web.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One running service.

    Args:
        settings: its limits.
        catalog: its database.
        jobs: the queue in it.
        calls: see :class:`~meshplan.cli.web.calls.Calls`.
    """

    settings: Settings
    catalog: Catalog
    jobs: Jobs
    calls: Calls
