"""Where surfaces of kernel times lie: those that ship, and those that the user fitted to tables of their own.

A user's file holds the surfaces of one device, ``NAME.SLUG.json`` beside the default database (or in the folder that
``MESHPLAN_SURFACES`` names). Its surfaces take the place of shipped ones of the same device, phase and framework.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from meshplan.catalogs.errors import CatalogError

ENVIRONMENT_VARIABLE = "MESHPLAN_SURFACES"


def user_folder() -> Path:
    """Folder of the user's surfaces; it need not exist."""
    configured = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if configured:
        return Path(configured).expanduser()
    return Path(platformdirs.user_data_dir("meshplan", appauthor=False)) / "surfaces"


def user_file(shipped: Path, device: str) -> Path:
    """The user's file for a device that stands beside the ``shipped`` one."""
    return user_folder() / f"{shipped.stem}.{device}.json"


def surface_documents(shipped: Path) -> Iterator[dict[str, Any]]:
    """The shipped file, then the user's.

    Raises:
        CatalogError: a file of the user is not JSON.
    """
    yield json.loads(shipped.read_text(encoding="utf-8"))
    for path in sorted(user_folder().glob(f"{shipped.stem}.*.json")):
        try:
            yield json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CatalogError(f"cannot read the surfaces {path}: {error}; remove it or fit it again") from error
