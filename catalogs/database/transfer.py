"""The catalog in and out of the database as one document (see :mod:`meshplan.catalogs.database.document`).

Writing is all or nothing: the document is checked as a whole, every problem is reported, and the rows go in within
the caller's one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import reading, writing
from meshplan.catalogs.database.document import FORMAT, SECTIONS, Section, future_problems, problems_of
from meshplan.catalogs.database.postgresql import by_code_point
from meshplan.catalogs.errors import CatalogError, Problem, UnknownEntryError, why
from meshplan.catalogs.units import now
from meshplan.catalogs.untrusted.limits import MAX_CATALOG_YAML_BYTES, MAX_JSON_BYTES

SEED = "seed"
USER = "user"

SECTION_TABLES = {"devices": tables.devices, "links": tables.links, "node_types": tables.node_types}
_FACT_COLUMNS = ("field", "value", "low", "high", "num_samples", "level", "source", "date")
PRICE_COLUMNS = ("usd_per_hour", "provider", "region", "terms", "source", "date")
_MODEL_COLUMNS = ("name", "family", "source", "date")
_CALIBRATION_COLUMNS = ("framework", "architecture", "document", "source", "date")
_FACT_KEY = ("subject_kind", "subject", "field", "level", "source", "date")
_PRICE_KEY = ("node_type", "provider", "region", "terms", "date", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What an import did, in rows.

    Args:
        added: new rows.
        replaced: rows whose key was there with other content.
        unchanged: rows that were there already.
    """

    added: int = 0
    replaced: int = 0
    unchanged: int = 0

    def __add__(self, other: Changes) -> Changes:
        return Changes(
            added=self.added + other.added,
            replaced=self.replaced + other.replaced,
            unchanged=self.unchanged + other.unchanged,
        )


def read_document(path: Path) -> Any:
    """Read a JSON or YAML file (by its suffix; anything but ``.json`` is read as YAML).

    Raises:
        CatalogError: unreadable, or not JSON/YAML.
    """
    from meshplan.catalogs.untrusted.documents import parse, read_text  # start-up: only imports read files

    is_json = path.suffix == ".json"
    try:
        text = read_text(path, MAX_JSON_BYTES if is_json else MAX_CATALOG_YAML_BYTES)
        return parse(text, is_json=is_json, name=str(path))
    except (OSError, ValueError) as error:
        raise CatalogError(f"cannot read {path}: {why(error)}") from error


def import_document(engine: Engine, document: Any, *, name: str = "the document") -> Changes:
    """Check a document and write it as the user's own rows, all or nothing.

    Args:
        engine: an opened catalog.
        document: plain JSON.
        name: how messages call it, a file name.

    Raises:
        CatalogError: lists every problem.
    """
    with writing(engine) as connection:
        require_sound(document, known_slugs(connection), name=name)
        problems = list(future_problems(document, _latest_day(connection)))
        if problems:
            raise CatalogError(_listed(name, problems))
        return write_document(connection, document, origin=USER)


def _latest_day(connection: Connection) -> str:
    """The last day that a number can be from: tomorrow (of other time zones), or the newest day of the seeds.

    The latter for machines whose clock is behind.
    """
    days = [
        connection.execute(sa.select(sa.func.max(table.c.date)).where(table.c.origin == SEED)).scalar()
        for table in (tables.facts, tables.prices, tables.models, tables.calibrations)
    ]
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    return max([tomorrow, *(str(day) for day in days if day)])


def require_sound(document: Any, known: Mapping[str, frozenset[str]], *, name: str) -> None:
    """Raise a :class:`CatalogError` that lists every problem of ``document``."""
    problems = problems_of(document, known)
    if problems:
        raise CatalogError(_listed(name, problems))


def known_slugs(connection: Connection) -> dict[str, frozenset[str]]:
    """Section name → slugs in the catalog."""
    return {
        name: frozenset(connection.execute(sa.select(table.c.slug)).scalars()) for name, table in SECTION_TABLES.items()
    }


def export_document(engine: Engine, slug: str | None = None) -> dict[str, Any]:
    """The whole catalog, or one entry with what it refers to left out.

    Raises:
        UnknownEntryError: no entry has that slug.
    """
    document: dict[str, Any] = {"format": FORMAT}
    with reading(engine) as connection:
        for section in SECTIONS:
            entries = _export_section(connection, section, slug)
            if entries:
                document[section.name] = entries
        models = _export_models(connection, slug)
        if models:
            document["models"] = models
        if slug is None:
            document["calibrations"] = _export_calibrations(connection)
        elif len(document) == 1:
            known = [name for slugs in known_slugs(connection).values() for name in slugs]
            known += connection.execute(sa.select(tables.models.c.slug)).scalars()
            raise UnknownEntryError("catalog entry", slug, known)
    return document


def write_document(connection: Connection, document: Mapping[str, Any], *, origin: str) -> Changes:
    """Write a sound document. Seed rows never overwrite an entry that the user has made their own."""
    changes = Changes()
    for section in SECTIONS:
        entries: Mapping[str, Any] = document.get(section.name, {})
        described = [
            {column: entry.get(column) for column in (*section.columns, *section.optional)} | {"slug": slug}
            for slug, entry in entries.items()
            if "name" in entry
        ]
        changes += _merge(connection, SECTION_TABLES[section.name], ("slug",), described, origin=origin)
        fact_rows = [
            {column: fact.get(column) for column in _FACT_COLUMNS}
            | {
                "subject_kind": section.kind,
                "subject": slug,
                "value": float(fact["value"]),
                "num_samples": fact.get("num_samples", 0),
            }
            for slug, entry in entries.items()
            for fact in entry.get("facts", [])
        ]
        changes += _merge(connection, tables.facts, _FACT_KEY, fact_rows, origin=origin, extra={"imported_at": now()})
    price_rows = [
        {column: price[column] for column in PRICE_COLUMNS} | {"node_type": slug}
        for slug, entry in document.get("node_types", {}).items()
        for price in entry.get("prices", [])
    ]
    changes += _merge(connection, tables.prices, _PRICE_KEY, price_rows, origin=origin)
    return changes + _write_models(connection, document, origin)


def _write_models(connection: Connection, document: Mapping[str, Any], origin: str) -> Changes:
    models = [
        {column: model[column] for column in _MODEL_COLUMNS} | {"slug": slug, "document": dict(model["config"])}
        for slug, model in document.get("models", {}).items()
    ]
    calibrations = [
        {column: row[column] for column in _CALIBRATION_COLUMNS} for row in document.get("calibrations", [])
    ]
    return _merge(connection, tables.models, ("slug",), models, origin=origin) + _merge(
        connection, tables.calibrations, ("framework", "architecture"), calibrations, origin=origin
    )


def _merge(
    connection: Connection,
    table: sa.Table,
    key: tuple[str, ...],
    rows: Iterable[dict[str, Any]],
    *,
    origin: str,
    extra: Mapping[str, Any] | None = None,
) -> Changes:
    """Bring ``rows`` into ``table``: equal rows stay, others with the same key are replaced."""
    # Within one document the last row of a key counts.
    wanted = {tuple(row[column] for column in key): row for row in rows}
    if not wanted:
        return Changes()
    present = {
        tuple(row[column] for column in key): dict(row) for row in connection.execute(sa.select(table)).mappings()
    }
    added, replaced, unchanged = [], [], 0
    for identity, row in wanted.items():
        stored = present.get(identity)
        if stored is None:
            added.append(row)
        elif (origin == SEED and stored["origin"] == USER) or all(stored[name] == row[name] for name in row):
            unchanged += 1
        else:
            replaced.append(row)
    for row in replaced:
        connection.execute(sa.delete(table).where(*(table.c[column] == row[column] for column in key)))
    inserted = [row | {"origin": origin} | dict(extra or {}) for row in (*added, *replaced)]
    if inserted:
        connection.execute(sa.insert(table), inserted)
    return Changes(added=len(added), replaced=len(replaced), unchanged=unchanged)


def _export_section(connection: Connection, section: Section, slug: str | None) -> dict[str, Any]:
    table = SECTION_TABLES[section.name]
    query = _narrowed(sa.select(table), table.c.slug, slug).order_by(by_code_point(table.c.slug))
    rows = connection.execute(query).mappings()
    entries: dict[str, Any] = {
        row["slug"]: {
            column: row[column] for column in (*section.columns, *section.optional) if row[column] is not None
        }
        | {"facts": []}
        for row in rows
    }
    facts = tables.facts
    query = _narrowed(sa.select(facts).where(facts.c.subject_kind == section.kind), facts.c.subject, slug)
    for fact in connection.execute(query.order_by(facts.c.id)).mappings():
        if fact["subject"] in entries:
            entries[fact["subject"]]["facts"].append(
                {column: fact[column] for column in _FACT_COLUMNS if fact[column] is not None}
            )
    if section.name == "node_types":
        prices = tables.prices
        query = _narrowed(sa.select(prices), prices.c.node_type, slug).order_by(prices.c.id)
        for price in connection.execute(query).mappings():
            if price["node_type"] in entries:
                entry = entries[price["node_type"]]
                entry.setdefault("prices", []).append({column: price[column] for column in PRICE_COLUMNS})
    return entries


def _export_models(connection: Connection, slug: str | None) -> dict[str, Any]:
    table = tables.models
    query = _narrowed(sa.select(table), table.c.slug, slug).order_by(by_code_point(table.c.slug))
    rows = connection.execute(query).mappings()
    return {
        row["slug"]: {column: row[column] for column in _MODEL_COLUMNS} | {"config": row["document"]} for row in rows
    }


def _export_calibrations(connection: Connection) -> list[dict[str, Any]]:
    table = tables.calibrations
    query = sa.select(table).order_by(by_code_point(table.c.framework), by_code_point(table.c.architecture))
    rows = connection.execute(query).mappings()
    return [{column: row[column] for column in _CALIBRATION_COLUMNS} for row in rows]


def _narrowed(query: sa.Select[Any], column: sa.Column[Any], slug: str | None) -> sa.Select[Any]:
    return query if slug is None else query.where(column == slug)


def _listed(name: str, problems: list[Problem]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return f"{count} in {name}; nothing was imported:\n{lines}"
