"""Opens the catalog for a command, and says so when its seed numbers are of another version."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


def open_catalog(db: str | None, *, or_shipped: bool = False) -> Catalog:
    """The catalog that ``--db`` names.

    Args:
        db: a file or a URL; None for the default.
        or_shipped: for commands that only read: where it cannot be opened, the numbers that ship with meshplan stand
            in, and stderr says so. A catalog that is none, or whose folder is missing, is an error all the same.

    Raises:
        CatalogError: it cannot be opened.
    """
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.database.seeds import seeds_are_stale
    from meshplan.catalogs.errors import CatalogUnavailableError

    try:
        catalog = Catalog.open(db)
    except CatalogUnavailableError as error:
        if not or_shipped:
            raise
        warn(f"{error}; going on with the numbers that ship with meshplan, without entries and plans of your own")
        return Catalog.open("sqlite://")
    if seeds_are_stale(catalog.engine):
        sys.stderr.write("note: the catalog holds seed numbers of another version; refresh: meshplan catalog upgrade\n")
    return catalog


def note(text: str) -> None:
    """One remark on stderr."""
    from meshplan.catalogs.untrusted.text import shown

    sys.stderr.write(f"note: {shown(text)}\n")


def warn(text: str) -> None:
    """One warning on stderr."""
    from meshplan.catalogs.untrusted.text import shown

    sys.stderr.write(f"warning: {shown(text)}\n")
