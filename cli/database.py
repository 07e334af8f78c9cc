"""Opens the catalog for a command, and says so when its seed numbers are of another version."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


def open_catalog(db: str | None) -> Catalog:
    """The catalog that ``--db`` names.

    Raises:
        CatalogError: it cannot be opened.
    """
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.database.seeds import seeds_are_stale

    catalog = Catalog.open(db)
    if seeds_are_stale(catalog.engine):
        sys.stderr.write("note: the catalog holds seed numbers of another version; refresh: meshplan catalog upgrade\n")
    return catalog
