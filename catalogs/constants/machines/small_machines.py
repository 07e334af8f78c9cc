"""Machines at home that generate text with their processor. They ship as ``seed/small_machines.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from meshplan.catalogs.constants.entries import seed_content

SMALL_MACHINE_FILE = "small_machines.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallMachine:
    """One kind of machine.

    Args:
        slug: the entry's, such as ``raspberry-pi-5``.
        name: as its maker calls it.
        cores: that compute.
        memory_bytes: installed, of the machine that was measured.
        memory_bandwidth_bytes_per_s: at which its memory was read, bytes/s.
        weights_per_s: weights of 4 bits that it multiplies with, each once.
        message_s: what one message costs the machine that waits for it, beyond wire and bytes.
        source: citation.
    """

    slug: str
    name: str
    cores: int
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    weights_per_s: float
    message_s: float
    source: str


@cache
def small_machines() -> Mapping[str, SmallMachine]:
    """Every known machine by name."""
    return {slug: _machine(slug, row) for slug, row in seed_content(SMALL_MACHINE_FILE)["machines"].items()}


def _machine(slug: str, row: Mapping[str, object]) -> SmallMachine:
    """YAML reads 5.56e9 as text: numbers of the entry as such."""
    kept = {name: row[name] for name in ("name", "source")}
    numbers = {name: float(str(value)) for name, value in row.items() if name not in kept}
    return SmallMachine(
        slug=slug,
        name=str(kept["name"]),
        source=str(kept["source"]),
        cores=int(numbers.pop("cores")),
        **numbers,
    )
