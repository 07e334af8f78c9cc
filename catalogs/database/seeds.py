"""The facts that ship with meshplan: YAML files under ``seed/`` to the exchange form, and into the database.

In the files every number stands under the key of its source, so a number without a source cannot be written::

    sources:
      vendor-sheet: {level: datasheet, date: 2026-11-21, citation: "https://…"}
    devices:
      h100-sxm-80gb:
        name: …
        numbers:
          vendor-sheet: {memory_bytes: 80 GiB, peak_flops_per_s: {bf16: 989 TFLOP/s}}

A number is a text with its unit, a bare count, or ``{value, low, high, num_samples}`` where a spread is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml
from sqlalchemy.engine import Connection, Engine

from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import reading, writing
from meshplan.catalogs.database.document import FORMAT
from meshplan.catalogs.database.transfer import SEED, Changes, require_sound, write_document
from meshplan.catalogs.efficiency import curve_facts
from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.facts import dimension_of
from meshplan.catalogs.models.config import shape_from_config
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.seed import SEED_FOLDER
from meshplan.catalogs.units import Dimension, parse_quantity
from meshplan.catalogs.yaml_reader import load_yaml

SEED_DIGEST_KEY = "seed_digest"


def seed_document(folder: Path = SEED_FOLDER) -> dict[str, Any]:
    """Every seed file as one document in the exchange form.

    Raises:
        CatalogError: a seed file is malformed; a bug of meshplan unless someone edited it.
    """
    document: dict[str, Any] = {
        "format": FORMAT,
        "devices": _entries(folder / "devices.yaml", "devices"),
        "links": _entries(folder / "links.yaml", "links"),
        "node_types": _entries(folder / "nodes.yaml", "node_types"),
        "models": _models(folder / "models.yaml"),
        "calibrations": [
            *_calibrations(folder / "calibrations.yaml", "framework"),
            *_calibrations(folder / "serving_calibrations.yaml", "engine"),
        ],
    }
    content = _load(folder / "efficiency.yaml")
    for slug in (*content["gemm_curves"], *content["same_silicon"]):
        document["devices"][slug]["facts"].extend(curve_facts(content, slug))
    content = _load(folder / "prices.yaml")
    for slug, prices in content["prices"].items():
        if slug not in document["node_types"]:
            raise CatalogError(f"{folder / 'prices.yaml'}: prices of {slug!r}, which is not in nodes.yaml")
        document["node_types"][slug]["prices"] = [_price(content, slug, price) for price in prices]
    return document


@cache
def seed_digest(folder: Path = SEED_FOLDER) -> str:
    """SHA-256 over names and contents of all seed files."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".json")):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def seed_model_shape(slug: str) -> ModelShape:
    """The shape of a model that ships with meshplan, without a database.

    Raises:
        KeyError: no such model ships.
    """
    entry = load_yaml((SEED_FOLDER / "models.yaml").read_text(encoding="utf-8"))["models"][slug]
    return shape_from_config(entry["config"], slug=slug, name=entry["name"], source=entry["source"])


def write_seeds(connection: Connection) -> Changes:
    """Replace the seed rows by those of this version; the user's own rows stay."""
    document = seed_document()
    require_sound(document, {}, name="the seed files")
    for table in tables.ENTRIES:
        connection.execute(sa.delete(table).where(table.c.origin == SEED))
    changes = write_document(connection, document, origin=SEED)
    connection.execute(sa.delete(tables.meta).where(tables.meta.c.key == SEED_DIGEST_KEY))
    connection.execute(sa.insert(tables.meta).values(key=SEED_DIGEST_KEY, value=seed_digest()))
    return changes


def refresh_seeds(engine: Engine) -> bool:
    """Bring the seed rows up to this version; whether anything had to be done."""
    if not seeds_are_stale(engine):
        return False
    with writing(engine) as connection:
        if not _are_stale(connection):
            return False  # another process was quicker
        write_seeds(connection)
    return True


def seeds_are_stale(engine: Engine) -> bool:
    """Whether the catalog holds the seeds of another version of meshplan."""
    with reading(engine) as connection:
        return _are_stale(connection)


def _are_stale(connection: Connection) -> bool:
    query = sa.select(tables.meta.c.value).where(tables.meta.c.key == SEED_DIGEST_KEY)
    return connection.execute(query).scalar() != seed_digest()


def _load(path: Path) -> Any:
    try:
        return load_yaml(path.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        raise CatalogError(f"cannot read the seed file {path}: {error}") from error


def _entries(path: Path, section: str) -> dict[str, Any]:
    content = _load(path)
    entries: dict[str, Any] = {}
    for slug, entry in content[section].items():
        texts = {key: value for key, value in entry.items() if key != "numbers"}
        facts = [
            fact
            for source, numbers in entry["numbers"].items()
            for fact in _facts(f"{path.name}: {slug}", _source(content, source, f"{path.name}: {slug}"), numbers)
        ]
        entries[slug] = texts | {"facts": facts}
    return entries


def _facts(place: str, evidence: Mapping[str, str], numbers: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, number in _flattened(numbers):
        spread = number if isinstance(number, Mapping) else {"value": number}
        fact: dict[str, Any] = {"field": name}
        for key in ("value", "low", "high"):
            if key in spread:
                fact[key] = _si_value(place, name, spread[key])
        yield fact | {"num_samples": spread.get("num_samples", 0)} | dict(evidence)


def _flattened(numbers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, number in numbers.items():
        if isinstance(number, Mapping) and "value" not in number:
            for key, inner in number.items():
                yield f"{name}.{key}", inner
        else:
            yield name, number


def _si_value(place: str, name: str, number: Any) -> float | int:
    dimension = dimension_of(name)
    if dimension is not None:
        # 12 digits are more than any source prints; the rest is rounding of the prefix (5.3 us is not 5.2999… us).
        value = float(f"{parse_quantity(number, dimension):.12g}")
        return int(value) if value == int(value) else value
    if isinstance(number, int):
        return number
    raise CatalogError(f"{place}: {name} is a count without a unit, not {number!r}")


def _source(content: Mapping[str, Any], key: str, place: str) -> dict[str, str]:
    sources = content["sources"]
    if key not in sources:
        raise CatalogError(f"{place}: unknown source {key!r}; add it under 'sources:'")
    source = sources[key]
    return {"level": source["level"], "source": source["citation"].strip(), "date": str(source["date"])}


def _price(content: Mapping[str, Any], slug: str, price: Mapping[str, Any]) -> dict[str, Any]:
    source = _source(content, price["source"], f"prices.yaml: {slug}")
    return {
        "usd_per_hour": parse_quantity(price["usd_per_hour"], Dimension.USD_PER_HOUR),
        "provider": price["provider"],
        "region": price["region"],
        "terms": price["terms"],
        "source": source["source"],
        "date": str(price.get("date", source["date"])),
    }


def _models(path: Path) -> dict[str, Any]:
    """``{name, source, date, config}`` by slug, where ``config`` is a Hugging Face configuration."""
    if not path.is_file():
        return {}
    return {
        slug: {
            "name": model["name"],
            "family": model["config"]["model_type"],
            "config": model["config"],
            "source": model["source"],
            "date": str(model["date"]),
        }
        for slug, model in _load(path)["models"].items()
    }


def _calibrations(path: Path, name: str) -> list[dict[str, Any]]:
    content = _load(path)
    return [
        {
            "framework": entry[name],
            "architecture": entry["architecture"],
            "document": {**entry, "source": content["source"], "date": str(content["date"])},
            "source": content["source"],
            "date": str(content["date"]),
        }
        for entry in content["calibrations"]
    ]
