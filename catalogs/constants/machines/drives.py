"""NVMe drives of hosts: what one reads in sequence. They ship as ``seed/drives.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from meshplan.catalogs.constants.entries import seed_content

DRIVE_FILE = "drives.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One drive.

    Args:
        slug: the entry's, such as ``samsung-990-pro``.
        name: as its maker calls it.
        read_bytes_per_s: most that it reads in sequence, bytes/s.
        source: citation.
    """

    slug: str
    name: str
    read_bytes_per_s: float
    source: str


@cache
def drives() -> Mapping[str, Drive]:
    """Every known drive by name."""
    return {
        slug: Drive(slug=slug, name=row["name"], read_bytes_per_s=float(row["read_bytes_per_s"]), source=row["source"])
        for slug, row in seed_content(DRIVE_FILE)["drives"].items()
    }
