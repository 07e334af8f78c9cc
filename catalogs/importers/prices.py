"""Price lists of SkyPilot and gpuhunt, as prices of the catalog's node types.

Both are CSV files with one rented machine per row, in USD per hour for the whole machine, though their headings do not
say so; the two formats are told apart by their headings and any other is rejected. A row is kept where the catalog has
a node type with the same accelerator and as many of them that is not named after another provider; the others are
counted, not guessed.

Source: https://github.com/skypilot-org/skypilot-catalog (columns), https://github.com/dstackai/gpuhunt (columns).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.document import FORMAT
from meshplan.catalogs.errors import CatalogError, Problem
from meshplan.catalogs.hardware import NodeType
from meshplan.catalogs.importers.csv_tables import MAX_PROBLEMS, is_number, refusal

# Names in the lists → device slugs.
ACCELERATORS: Mapping[str, str] = {
    "A100": "a100-sxm-40gb",
    "A100-80GB": "a100-sxm-80gb",
    "A10G": "a10g",
    "B200": "b200-sxm-180gb",
    "B300": "b300",
    "GB200": "gb200",
    "H100": "h100-sxm-80gb",
    "H200": "h200-sxm-141gb",
    "L4": "l4",
    "L40S": "l40s",
    "MI300X": "mi300x",
    "T4": "t4",
    "V100": "v100-sxm2-16gb",
    "V100-32GB": "v100-sxm2-32gb",
}
MAX_USD_PER_HOUR = 1e5
_PROVIDER_PREFIXES = ("aws", "gcp", "azure", "oci", "lambda", "coreweave")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialect:
    """Headings of one kind of list; gpuhunt gives a spot price a row of its own, SkyPilot a column."""

    name: str
    accelerator: str
    count: str
    region: str
    price: str
    spot_price: str | None
    is_spot: str | None


_DIALECTS = (
    _Dialect(
        name="SkyPilot",
        accelerator="AcceleratorName",
        count="AcceleratorCount",
        region="Region",
        price="Price",
        spot_price="SpotPrice",
        is_spot=None,
    ),
    _Dialect(
        name="gpuhunt",
        accelerator="gpu_name",
        count="gpu_count",
        region="location",
        price="price",
        spot_price=None,
        is_spot="spot",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """What a list gave.

    Args:
        document: for :func:`meshplan.catalogs.database.transfer.import_document`.
        num_prices: prices in the document.
        num_unmatched: offers of accelerators for which the catalog has no node type.
    """

    document: dict[str, Any]
    num_prices: int
    num_unmatched: int


def read_prices(
    text: str, node_types: Sequence[NodeType], *, provider: str, source: str, date: str, name: str
) -> PriceList:
    """Prices of the node types that a list offers.

    Args:
        text: the CSV.
        node_types: those of the catalog.
        provider: whose list it is, such as ``aws``.
        source: citation of the list.
        date: day on which it was read, ISO 8601.
        name: the file's, for messages.

    Raises:
        CatalogError: in neither format, or with malformed rows; nothing of it is used.
    """
    reader = csv.DictReader(io.StringIO(text))
    dialect = _dialect_of(reader.fieldnames or (), name)
    problems: list[Problem] = []
    prices: dict[str, list[dict[str, Any]]] = {}
    unmatched = 0
    for line, row in enumerate(reader, start=2):
        if not row.get(dialect.accelerator):
            continue  # a machine without accelerators
        try:
            offers = list(_offers(dialect, row))
            count = _number(row, dialect.count, high=1024)
        except ValueError as error:
            problems.append(Problem(path=f"line {line}", message=str(error)))
            continue
        slugs = _matching(node_types, ACCELERATORS.get(row[dialect.accelerator] or ""), count, provider)
        unmatched += not slugs
        for slug in slugs:
            for terms, usd_per_hour in offers:
                offer = {"usd_per_hour": usd_per_hour, "provider": provider, "region": row[dialect.region]}
                prices.setdefault(slug, []).append(offer | {"terms": terms, "source": source, "date": date})
    if problems:
        raise refusal(Path(name), problems[:MAX_PROBLEMS])
    return PriceList(
        document={"format": FORMAT, "node_types": {slug: {"prices": rows} for slug, rows in prices.items()}},
        num_prices=sum(len(rows) for rows in prices.values()),
        num_unmatched=unmatched,
    )


def _dialect_of(header: Sequence[str], name: str) -> _Dialect:
    for dialect in _DIALECTS:
        wanted = {dialect.accelerator, dialect.count, dialect.region, dialect.price}
        if wanted <= set(header):
            return dialect
    raise CatalogError(
        f"{name} is no price list of SkyPilot (AcceleratorName, AcceleratorCount, Region, Price) or gpuhunt "
        f"(gpu_name, gpu_count, location, price); its headings are {', '.join(header) or 'missing'}"
    )


def _offers(dialect: _Dialect, row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if not row.get(dialect.region) or is_number(row[dialect.region]):
        raise ValueError(f"{dialect.region}: {row.get(dialect.region)!r} is no region; are columns swapped?")
    is_spot = dialect.is_spot is not None and str(row.get(dialect.is_spot)).lower() == "true"
    if row.get(dialect.price):
        yield "spot" if is_spot else "on-demand", _number(row, dialect.price, high=MAX_USD_PER_HOUR)
    if dialect.spot_price and row.get(dialect.spot_price):
        yield "spot", _number(row, dialect.spot_price, high=MAX_USD_PER_HOUR)


def _number(row: Mapping[str, Any], column: str, *, high: float) -> float:
    text = row.get(column)
    if text is None or not is_number(text):
        raise ValueError(f"{column}: {text!r} is not a number; are columns swapped?")
    value = float(text)
    if not 0.0 < value <= high:
        raise ValueError(f"{column}: {text} is outside 0 … {high:g}")
    return value


def _matching(node_types: Sequence[NodeType], device: str | None, count: float, provider: str) -> list[str]:
    return [
        node.slug
        for node in node_types
        if node.device.slug == device and node.num_devices == count and _may_be_rented(node.slug, provider)
    ]


def _may_be_rented(slug: str, provider: str) -> bool:
    owner = slug.partition("-")[0]
    return owner == provider or owner not in _PROVIDER_PREFIXES
