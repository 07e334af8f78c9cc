"""One kind of database, for tests that hold all kinds to the same behaviour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Store:
    """One kind of database.

    Args:
        name: ``sqlite`` or ``postgresql``.
        empty: the URL of a fresh database.
        seeded: the URL of a fresh catalog.
    """

    name: str
    empty: Callable[[], str]
    seeded: Callable[[], str]
