"""Schema revisions of the catalog; see catalogs/README.md.

:func:`upgrade` runs alembic from code: no ``alembic.ini`` is needed, so an installed wheel can upgrade too.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path

from sqlalchemy.engine import Engine

from meshplan.catalogs.database.connection import writing


def known_revisions() -> tuple[str, ...]:
    """Revisions that this version can read or upgrade, oldest first; a module ``r0001_…`` holds revision ``0001``."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "versions")]))
    return tuple(name.removeprefix("r").partition("_")[0] for name in names)


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Bring the schema of the database to ``revision`` in one transaction."""
    from alembic import command  # start-up: a tenth of a second that only an upgrade needs
    from alembic.config import Config

    config = Config()
    # Alembic reads its options through configparser, where a percent sign is special.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    with writing(engine) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
