"""Entries of the seed files about software (engines, frameworks, benchmarks) as frozen objects.

They are read from the files, not stored in the database: knowledge about software, not measurements of a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from meshplan.catalogs.seed import SEED_FOLDER
from meshplan.catalogs.yaml_reader import load_yaml

Entry = TypeVar("Entry")


def seed_content(name: str) -> Any:
    """The values of a seed file."""
    return load_yaml((SEED_FOLDER / name).read_bytes())


def read_entry(kind: type[Entry], entry: Mapping[str, Any], **more: Any) -> Entry:
    """An object whose fields are the keys of an entry; lists become tuples.

    Raises:
        TypeError: the entry has a key that is no field, or lacks one without a default.
    """
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in {**entry, **more}.items()}
    return kind(**values)
