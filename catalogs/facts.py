"""One number of the catalog with where it comes from: how it is named, measured, checked and chosen.

A *fact* is one value of one field of one subject (``peak_flops_per_s.bf16`` of the device ``h100-sxm-80gb``). Several
facts may answer the same question; :func:`ruling_fact` says which one counts:

1. the best evidence level wins (measured here > measured elsewhere > fitted > datasheet > assumed);
2. within a level the newest date wins;
3. within a day the one that came last into the catalog wins.

Facts that are not valid (:func:`fact_problems`) never enter the catalog, so the rule is "the newest valid fact of the
best level". A field's name ends with its SI unit, from which :func:`dimension_of` reads its dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import TypeGuard

from meshplan.catalogs.efficiency import (
    BANDWIDTH_FIELD,
    GEMM_PRECISIONS,
    OPERATOR_CLASSES,
    RATE_FIELD,
    SATURATION_FIELD,
    SCALE_FIELD,
)
from meshplan.catalogs.errors import closest_names, did_you_mean
from meshplan.catalogs.hardware import Evidence, EvidenceLevel
from meshplan.catalogs.units import Dimension, format_bandwidth, format_bytes, format_duration, format_flops

# Best first, as the enumeration is declared.
LEVEL_RANK: Mapping[str, int] = {level.value: rank for rank, level in enumerate(EvidenceLevel)}

PEAK_PREFIX = "peak_flops_per_s."
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8", "int4")

# Devices of a node whose links are described pair by pair, as many as the planner can price
# (meshplan.planner.cluster.mesh).
MOST_MESHED = 16
PAIR_PREFIX = "pair_links."
EVERY_PAIR = "links_per_pair"

# Longest suffix first: ``_bytes_per_s`` also ends with ``_s``. Counts have no unit, hence None.
_DIMENSION_BY_SUFFIX: tuple[tuple[str, Dimension | None], ...] = (
    ("_flops_per_s", Dimension.FLOPS_PER_S),
    ("_bytes_per_s", Dimension.BYTES_PER_S),
    ("_bytes", Dimension.BYTES),
    ("_per_host", None),
    ("_s", Dimension.S),
    ("_w", Dimension.W),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One numeric field of a kind of subject.

    Args:
        name: as in :mod:`meshplan.catalogs.hardware`; nested values are dotted.
        required: every subject of the kind must have it.
        low: least sane value, SI; catches a wrong prefix, not a wrong product.
        high: greatest sane value, SI.
        integer: whole numbers only.
    """

    name: str
    required: bool
    low: float
    high: float
    integer: bool = False


# The sane ranges are wide on purpose: two decades around what has been sold from 2017 to 2026; rates of devices reach
# down to a share of one core, which is profiled like any other.
FIELDS: Mapping[str, tuple[Field, ...]] = {
    "device": (
        Field(name="memory_bytes", required=True, low=1e9, high=4e12, integer=True),
        Field(name="usable_memory_bytes", required=True, low=1e9, high=4e12, integer=True),
        Field(name="memory_bandwidth_bytes_per_s", required=True, low=1e8, high=1e14),
        Field(name="tdp_w", required=False, low=10.0, high=1e4),
        Field(name="eager_launch_s", required=False, low=1e-7, high=1e-2),
        *(Field(name=f"{PEAK_PREFIX}{dtype}", required=False, low=1e8, high=1e18) for dtype in DTYPES),
        # A curve's bandwidth is a parameter of the model, not the memory's.
        *(Field(name=f"{RATE_FIELD}.{name}", required=False, low=1e8, high=1e18) for name in GEMM_PRECISIONS),
        *(Field(name=f"{BANDWIDTH_FIELD}.{name}", required=False, low=1e7, high=1e15) for name in GEMM_PRECISIONS),
        *(Field(name=f"{SATURATION_FIELD}.{name}", required=False, low=0.0, high=1e6) for name in GEMM_PRECISIONS),
        # Twenty times faster than the same device elsewhere is another device; a hundred times slower is broken.
        *(Field(name=f"{SCALE_FIELD}.{name}", required=False, low=0.05, high=100.0) for name in OPERATOR_CLASSES),
    ),
    "link": (
        Field(name="bandwidth_bytes_per_s", required=True, low=1e8, high=1e13),
        Field(name="latency_s", required=True, low=1e-8, high=1e-2),
    ),
    "node_type": (
        Field(name="num_hosts", required=True, low=1, high=1e4, integer=True),
        Field(name="devices_per_host", required=True, low=1, high=64, integer=True),
        Field(name="nics_per_host", required=True, low=0, high=128, integer=True),
        Field(name="host_memory_bytes", required=False, low=1e9, high=1e14, integer=True),
        # Links between every two devices of a node without a switch, or between two of them: ``pair_links.0-3``.
        Field(name=EVERY_PAIR, required=False, low=1, high=36, integer=True),
        *(
            Field(name=f"{PAIR_PREFIX}{first}-{second}", required=False, low=1, high=36, integer=True)
            for second in range(MOST_MESHED)
            for first in range(second)
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One value with its evidence, as stored.

    Args:
        field: field name, see :data:`FIELDS`.
        value: in the field's SI unit.
        evidence: level, citation, date, samples and spread.
        order: larger came later into the catalog.
        origin: ``seed`` (ships with meshplan) or ``user`` (imported or measured).
    """

    field: str
    value: float
    evidence: Evidence
    order: int = 0
    origin: str = "user"


def dimension_of(field: str) -> Dimension | None:
    """Dimension of a field by the unit in its name; None for counts.

    >>> dimension_of("peak_flops_per_s.bf16"), dimension_of("num_hosts")
    (<Dimension.FLOPS_PER_S: 'a compute rate (FLOP/s)'>, None)
    """
    stem = f"_{field.partition('.')[0]}"
    if stem.startswith("_num_"):
        return None
    return next((dimension for suffix, dimension in _DIMENSION_BY_SUFFIX if stem.endswith(suffix)), None)


def format_value(field: str, value: float) -> str:
    """The value as a person reads it.

    >>> format_value("memory_bytes", 85899345920), format_value("devices_per_host", 8.0)
    ('80.0 GiB', '8')
    """
    match dimension_of(field):
        case Dimension.BYTES:
            return format_bytes(value)
        case Dimension.BYTES_PER_S:
            return format_bandwidth(value)
        case Dimension.FLOPS_PER_S:
            return format_flops(value)
        case Dimension.S:
            return format_duration(value)
        case Dimension.W:
            return f"{value:g} W"
        case _:
            return f"{value:g}"


def ruling_fact(facts: Iterable[Fact]) -> Fact:
    """The fact that counts among several for one field; see the module's text for the rule."""
    return max(facts, key=lambda fact: (-LEVEL_RANK[fact.evidence.level.value], fact.evidence.date, fact.order))


def ruling_facts(facts: Iterable[Fact]) -> dict[str, Fact]:
    """Field → the fact that counts."""
    by_field: dict[str, list[Fact]] = {}
    for fact in facts:
        by_field.setdefault(fact.field, []).append(fact)
    return {field: ruling_fact(candidates) for field, candidates in by_field.items()}


def fact_problems(kind: str, row: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with one fact in its plain form (``field``, ``value``, ``level``, ``source``, ``date`` …)."""
    name = row.get("field")
    known = {field.name: field for field in FIELDS[kind]}
    if not isinstance(name, str) or name not in known:
        yield f"unknown field {name!r} of a {kind}{did_you_mean(closest_names(str(name), known))}"
        return
    field, value = known[name], row.get("value")
    if not _is_number(value):
        yield f"{name}: value must be a finite number in SI units, not {value!r}"
    elif not field.low <= value <= field.high:
        shown = format_value(name, value)
        yield f"{name}: {shown} ({value:g}) is outside {field.low:g} … {field.high:g}; wrong prefix?"
    elif field.integer and value != int(value):
        yield f"{name}: {value!r} must be a whole number"
    else:
        yield from _spread_problems(name, value, row.get("low"), row.get("high"))
    samples = row.get("num_samples", 0)
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
        yield f"{name}: num_samples must be a whole number of at least 0, not {samples!r}"
    level = row.get("level")
    if not isinstance(level, str) or level not in LEVEL_RANK:
        yield f"{name}: unknown evidence level {level!r}; one of {', '.join(LEVEL_RANK)}"
    yield from source_problems(name, row)


def source_problems(what: str, row: Mapping[str, object]) -> Iterator[str]:
    """Problems of ``source`` and ``date``, which every number must have."""
    source, day = row.get("source"), row.get("date")
    if not isinstance(source, str) or not source.strip():
        yield f"{what}: no source; every number needs a citation"
    if not isinstance(day, str) or not _is_iso_date(day):
        yield f"{what}: date must be a day like '2026-11-21', not {day!r}"


def _spread_problems(name: str, value: float, low: object, high: object) -> Iterator[str]:
    for end, bound in (("low", low), ("high", high)):
        if bound is not None and not _is_number(bound):
            yield f"{name}: {end} must be a finite number or absent, not {bound!r}"
            return
    if (isinstance(low, (int, float)) and low > value) or (isinstance(high, (int, float)) and high < value):
        yield f"{name}: {value:g} is not between low {low!r} and high {high!r}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_iso_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
