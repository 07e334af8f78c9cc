"""Processors of hosts: memory bandwidth and matrix rates of one socket. They ship as ``seed/hosts.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from meshplan.catalogs.constants.entries import read_entry, seed_content

HOST_FILE = "hosts.yaml"
# The entry for a host of which only the memory is known.
ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcessor:
    """One socket of a host.

    Args:
        slug: the entry's, such as ``xeon-gold-6454s``.
        name: as its vendor calls it.
        cores: physical; 0 where unknown.
        memory_bandwidth_bytes_per_s: peak of its memory channels, bytes/s.
        matrix_flops_per_s: bytes of a stored weight (2, or 1 for 8 bits and less) → attained FLOP/s.
        instructions: of ``amx``, ``avx512``, ``avx2``.
        source: citation.
    """

    slug: str
    name: str
    cores: int
    memory_bandwidth_bytes_per_s: float
    matrix_flops_per_s: Mapping[int, float]
    instructions: tuple[str, ...]
    source: str


@cache
def host_processors() -> Mapping[str, HostProcessor]:
    """Every known processor by name."""
    entries = seed_content(HOST_FILE)["hosts"]
    return {slug: read_entry(HostProcessor, _numbers(entry), slug=slug) for slug, entry in entries.items()}


def _numbers(entry: Mapping[str, object]) -> dict[str, object]:
    """YAML reads 307.2e9 as text: numbers of the table as such."""
    rates = entry["matrix_flops_per_s"]
    if not isinstance(rates, Mapping):
        raise TypeError("matrix_flops_per_s must map bytes of a weight to rates")
    return {
        **entry,
        "memory_bandwidth_bytes_per_s": float(str(entry["memory_bandwidth_bytes_per_s"])),
        "matrix_flops_per_s": {int(size): float(str(rate)) for size, rate in rates.items()},
    }
