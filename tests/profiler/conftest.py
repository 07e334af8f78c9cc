"""An empty catalog to write into."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshplan.catalogs.database.connection import connect, parse_url
from meshplan.catalogs.database.tables import metadata
from meshplan.catalogs.measurements.rows import Measurements


@pytest.fixture
def store(tmp_path: Path) -> Measurements:
    """A catalog with nothing in it."""
    engine = connect(parse_url(str(tmp_path / "catalog.sqlite")))
    with engine.begin() as connection:
        metadata.create_all(connection)
    return Measurements(engine)
