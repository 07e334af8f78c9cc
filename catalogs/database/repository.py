"""Domain objects out of the catalog: a name in, a frozen :class:`Device`, :class:`NodeType` … out.

Which of several facts counts is decided in :func:`meshplan.catalogs.facts.ruling_fact`; here rows become objects.
Everything is read in a few queries, so that a command that lists all node types asks the database five times, not
five hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import reading, shown, writing
from meshplan.catalogs.database.document import FORMAT, SECTIONS
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.postgresql import by_code_point
from meshplan.catalogs.database.transfer import PRICE_COLUMNS, SECTION_TABLES, USER, import_document
from meshplan.catalogs.efficiency import gemm_curves, operator_scales
from meshplan.catalogs.errors import CatalogError, UnknownEntryError
from meshplan.catalogs.facts import PEAK_PREFIX, Fact, ruling_facts
from meshplan.catalogs.hardware import Device, Evidence, EvidenceLevel, Link, NodeType, Price
from meshplan.catalogs.meshed import pair_links
from meshplan.catalogs.names import ModelName, hardware_name, model_name

if TYPE_CHECKING:
    from meshplan.catalogs.models.shapes import ModelShape

Facts = Mapping[str, list[Fact]]


class Catalog:
    """What hardware, models and prices exist.

    Args:
        engine: an opened database, see :func:`meshplan.catalogs.database.opening.open_database`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def open(cls, url: str | None = None) -> Catalog:
        """Open (and on first use create) the catalog at a URL or path; None for the default place."""
        return cls(open_database(url))

    # --- one entry ----------------------------------------------------------------------------------------------

    def device(self, slug: str) -> Device:
        """The accelerator ``slug``.

        Raises:
            UnknownEntryError: no such device.
        """
        with reading(self.engine) as connection:
            row = _row(connection, tables.devices, slug, "device")
            return _device(row, _facts_of(connection, "device", row["slug"]))

    def link(self, slug: str) -> Link:
        """The link ``slug``.

        Raises:
            UnknownEntryError: no such link.
        """
        with reading(self.engine) as connection:
            row = _row(connection, tables.links, slug, "link")
            return _link(row, _facts_of(connection, "link", row["slug"]))

    def node_type(self, slug: str) -> NodeType:
        """The node type ``slug`` with its device, links and prices.

        Raises:
            UnknownEntryError: no such node type.
        """
        with reading(self.engine) as connection:
            row = _row(connection, tables.node_types, slug, "node type")
            facts = _facts_of(connection, "node_type", row["slug"])
        return _node_type(
            row,
            facts,
            {row["device"]: self.device(row["device"])},
            {link: self.link(link) for link in (row["scale_up_link"], row["scale_out_link"]) if link},
            self.prices(row["slug"]),
        )

    def model(self, slug: str) -> dict[str, Any]:
        """The Hugging Face configuration of the model ``slug``.

        Raises:
            UnknownEntryError: no such model.
        """
        with reading(self.engine) as connection:
            document: dict[str, Any] = _row(connection, tables.models, slug, "model")["document"]
        return document

    def model_name(self, written: str) -> ModelName | None:
        """The model that a name or a Hugging Face id means, and the format of the weights that it tells."""
        with reading(self.engine) as connection:
            return model_name(written, _model_sources(connection))

    def model_shape(self, slug: str) -> ModelShape:
        """The shape of the model ``slug``, written as in the catalog or as a Hugging Face id.

        Raises:
            UnknownEntryError: no such model.
        """
        # start-up: only questions about a model read configurations
        from meshplan.catalogs.models.config import shape_from_config

        with reading(self.engine) as connection:
            row = _row(connection, tables.models, slug, "model")
        return shape_from_config(row["document"], slug=row["slug"], name=row["name"], source=row["source"])

    def prices(self, node_type: str) -> tuple[Price, ...]:
        """Known prices of a node type, newest first; empty where nobody rents it out."""
        with reading(self.engine) as connection:
            return _prices_by_node(connection, node_type).get(node_type, ())

    def facts(self, subject_kind: str, subject: str) -> tuple[Fact, ...]:
        """Every stored fact of a subject, the ruling ones and the others, in field order.

        Args:
            subject_kind: ``device``, ``link`` or ``node_type``.
            subject: slug.
        """
        with reading(self.engine) as connection:
            return tuple(_facts_of(connection, subject_kind, subject))

    # --- all entries --------------------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        """Every accelerator, by slug."""
        with reading(self.engine) as connection:
            facts = _facts_by_subject(connection, "device")
            return tuple(_device(row, facts.get(row["slug"], [])) for row in _rows(connection, tables.devices))

    def links(self) -> tuple[Link, ...]:
        """Every link, by slug."""
        with reading(self.engine) as connection:
            facts = _facts_by_subject(connection, "link")
            return tuple(_link(row, facts.get(row["slug"], [])) for row in _rows(connection, tables.links))

    def node_types(self) -> tuple[NodeType, ...]:
        """Every node type, by slug."""
        devices = {device.slug: device for device in self.devices()}
        links = {link.slug: link for link in self.links()}
        with reading(self.engine) as connection:
            facts = _facts_by_subject(connection, "node_type")
            prices = _prices_by_node(connection)
            return tuple(
                _node_type(row, facts.get(row["slug"], []), devices, links, prices.get(row["slug"], ()))
                for row in _rows(connection, tables.node_types)
            )

    def models(self) -> tuple[Mapping[str, Any], ...]:
        """Every model as ``slug, name, family, source, date``, without its configuration."""
        columns = ("slug", "name", "family", "source", "date")
        query = sa.select(*(tables.models.c[column] for column in columns)).order_by(
            by_code_point(tables.models.c.slug)
        )
        with reading(self.engine) as connection:
            return tuple(dict(zip(columns, row, strict=True)) for row in connection.execute(query))

    # --- calibrations -------------------------------------------------------------------------------------------

    def calibration(self, framework: str, architecture: str) -> dict[str, Any] | None:
        """The estimator's named constants for a framework on a device generation; None where none were fitted."""
        table = tables.calibrations
        query = sa.select(table.c.document).where(table.c.framework == framework, table.c.architecture == architecture)
        with reading(self.engine) as connection:
            document: dict[str, Any] | None = connection.execute(query).scalar()
        return document

    def put_calibration(
        self, framework: str, architecture: str, document: Mapping[str, Any], *, source: str, date: str | None = None
    ) -> None:
        """Store named constants, in place of earlier ones.

        Args:
            framework: such as ``megatron``.
            architecture: such as ``hopper``.
            document: the constants, plain JSON.
            source: which observations they were fitted to.
            date: day of the fit, ISO 8601; None for the current date.
        """
        row = {
            "framework": framework,
            "architecture": architecture,
            "document": dict(document),
            "source": source,
            "date": date or datetime.now(UTC).date().isoformat(),
        }
        import_document(self.engine, {"format": FORMAT, "calibrations": [row]}, name="the calibration")

    def add_facts(self, subject_kind: str, subject: str, facts: Iterable[Fact]) -> None:
        """Store measured facts of a subject that the catalog has.

        Raises:
            UnknownEntryError: no such subject.
            CatalogError: a fact is not valid; nothing is stored.
        """
        section = next(section for section in SECTIONS if section.kind == subject_kind)
        with reading(self.engine) as connection:
            _row(connection, SECTION_TABLES[section.name], subject, subject_kind.replace("_", " "))
        rows = [
            {
                "field": fact.field,
                "value": fact.value,
                "low": fact.evidence.low,
                "high": fact.evidence.high,
                "num_samples": fact.evidence.num_samples,
                "level": fact.evidence.level.value,
                "source": fact.evidence.source,
                "date": fact.evidence.date,
            }
            for fact in facts
        ]
        import_document(
            self.engine, {"format": FORMAT, section.name: {subject: {"facts": rows}}}, name=f"the facts of {subject}"
        )

    def forget(self, subject: str) -> int:
        """Remove the user's own rows about a subject, and bring back the seed rows that they stood in for.

        Args:
            subject: slug of an entry, or ``FRAMEWORK/ARCHITECTURE`` of constants.

        Returns:
            How many rows of the user went.
        """
        from meshplan.catalogs.database.seeds import write_seeds  # start-up: only this reads the seed files

        framework, _, architecture = subject.partition("/")
        places = (
            (tables.facts, "subject"),
            (tables.prices, "node_type"),
            *((table, "slug") for table in (tables.devices, tables.links, tables.node_types, tables.models)),
        )
        removed = 0
        with writing(self.engine) as connection:
            for table, column in places:
                query = sa.delete(table).where(table.c[column] == subject, table.c.origin == USER)
                removed += connection.execute(query).rowcount
            constants = tables.calibrations
            query = sa.delete(constants).where(
                constants.c.framework == framework,
                constants.c.architecture == architecture,
                constants.c.origin == USER,
            )
            removed += connection.execute(query).rowcount
            if removed:
                write_seeds(connection)
        return removed

    def own_rows(self) -> tuple[Mapping[str, Any], ...]:
        """The user's own rows, what came last first: ``subject, what, value, date, source, imported_at``."""
        facts, prices, models, constants = tables.facts, tables.prices, tables.models, tables.calibrations
        found: list[dict[str, Any]] = []
        with reading(self.engine) as connection:
            query = sa.select(facts).where(facts.c.origin == USER).order_by(facts.c.id.desc())
            found += [
                _own(row, row["subject"], row["field"], row["value"]) for row in connection.execute(query).mappings()
            ]
            query = sa.select(prices).where(prices.c.origin == USER).order_by(prices.c.id.desc())
            for row in connection.execute(query).mappings():
                what = f"price of {row['provider']}, {row['terms']}"
                found.append(_own(row, row["node_type"], what, row["usd_per_hour"]))
            for table in (tables.devices, tables.links, tables.node_types, models):
                query = sa.select(table).where(table.c.origin == USER).order_by(by_code_point(table.c.slug))
                found += [
                    _own(row, row["slug"], table.name, row["name"]) for row in connection.execute(query).mappings()
                ]
            query = sa.select(constants).where(constants.c.origin == USER)
            query = query.order_by(by_code_point(constants.c.framework), by_code_point(constants.c.architecture))
            for row in connection.execute(query).mappings():
                found.append(_own(row, f"{row['framework']}/{row['architecture']}", "constants", None))
        return tuple(found)

    def __repr__(self) -> str:
        return f"Catalog({shown(self.engine.url)!r})"


def _own(row: Mapping[Any, Any], subject: str, what: str, value: Any) -> dict[str, Any]:
    return {
        "subject": subject,
        "what": what,
        "value": value,
        "date": row.get("date"),
        "source": row.get("source"),
        "imported_at": row.get("imported_at"),
    }


def _rows(connection: Connection, table: sa.Table) -> list[Mapping[str, Any]]:
    query = sa.select(table).order_by(by_code_point(table.c.slug))
    return [dict(row) for row in connection.execute(query).mappings()]


def _row(connection: Connection, table: sa.Table, slug: str, kind: str) -> Mapping[str, Any]:
    row = connection.execute(sa.select(table).where(table.c.slug == slug)).mappings().first()
    if row is None:
        meant = _meant(connection, table, slug)
        if meant is None:
            raise UnknownEntryError(kind, slug, connection.execute(sa.select(table.c.slug)).scalars())
        row = connection.execute(sa.select(table).where(table.c.slug == meant)).mappings().one()
    return dict(row)


def _meant(connection: Connection, table: sa.Table, written: str) -> str | None:
    """The entry that a name written in another way means (:mod:`meshplan.catalogs.names`); None where none does."""
    if table is tables.models:
        name = model_name(written, _model_sources(connection))
        return None if name is None else name.slug
    return hardware_name(written, connection.execute(sa.select(table.c.slug)).scalars())


def _model_sources(connection: Connection) -> dict[str, str]:
    """Name → source of every model."""
    rows = connection.execute(sa.select(tables.models.c.slug, tables.models.c.source))
    return {str(slug): str(source) for slug, source in rows}


def _facts_of(connection: Connection, kind: str, subject: str) -> list[Fact]:
    return _facts_by_subject(connection, kind, subject).get(subject, [])


def _facts_by_subject(connection: Connection, kind: str, subject: str | None = None) -> Facts:
    table = tables.facts
    query = sa.select(table).where(table.c.subject_kind == kind).order_by(by_code_point(table.c.field), table.c.id)
    if subject is not None:
        query = query.where(table.c.subject == subject)
    by_subject: dict[str, list[Fact]] = {}
    for row in connection.execute(query).mappings():
        by_subject.setdefault(row["subject"], []).append(_fact(row))
    return by_subject


def _fact(row: Mapping[Any, Any]) -> Fact:
    columns = ("source", "date", "num_samples", "low", "high")
    evidence = Evidence(level=EvidenceLevel(row["level"]), **{name: row[name] for name in columns})
    return Fact(field=row["field"], value=row["value"], evidence=evidence, order=row["id"], origin=row["origin"])


def _prices_by_node(connection: Connection, node_type: str | None = None) -> dict[str, tuple[Price, ...]]:
    table = tables.prices
    query = sa.select(table) if node_type is None else sa.select(table).where(table.c.node_type == node_type)
    prices: dict[str, tuple[Price, ...]] = {}
    for row in connection.execute(query.order_by(table.c.date.desc(), table.c.usd_per_hour, table.c.id)).mappings():
        price = Price(**{name: row[name] for name in PRICE_COLUMNS})
        prices[row["node_type"]] = (*prices.get(row["node_type"], ()), price)
    return prices


def _device(row: Mapping[str, Any], facts: Iterable[Fact]) -> Device:
    ruling = ruling_facts(facts)
    values = {field: fact.value for field, fact in ruling.items()}
    return Device(
        slug=row["slug"],
        name=row["name"],
        vendor=row["vendor"],
        architecture=row["architecture"],
        memory_bytes=int(_value(ruling, "memory_bytes", row)),
        usable_memory_bytes=int(_value(ruling, "usable_memory_bytes", row)),
        memory_bandwidth_bytes_per_s=_value(ruling, "memory_bandwidth_bytes_per_s", row),
        peak_flops_per_s={
            field.removeprefix(PEAK_PREFIX): fact.value
            for field, fact in ruling.items()
            if field.startswith(PEAK_PREFIX)
        },
        tdp_w=ruling["tdp_w"].value if "tdp_w" in ruling else None,
        eager_launch_s=values.get("eager_launch_s"),
        gemm_curves=gemm_curves(values),
        operator_scales=operator_scales(values),
        evidence=_evidence(ruling),
    )


def _link(row: Mapping[str, Any], facts: Iterable[Fact]) -> Link:
    ruling = ruling_facts(facts)
    return Link(
        slug=row["slug"],
        name=row["name"],
        technology=row["technology"],
        bandwidth_bytes_per_s=_value(ruling, "bandwidth_bytes_per_s", row),
        latency_s=_value(ruling, "latency_s", row),
        evidence=_evidence(ruling),
    )


def _node_type(
    row: Mapping[str, Any],
    facts: Iterable[Fact],
    devices: Mapping[str, Device],
    links: Mapping[str, Link],
    prices: tuple[Price, ...],
) -> NodeType:
    ruling = ruling_facts(facts)
    memory = ruling.get("host_memory_bytes")
    return NodeType(
        slug=row["slug"],
        name=row["name"],
        device=devices[row["device"]],
        num_hosts=int(_value(ruling, "num_hosts", row)),
        devices_per_host=int(_value(ruling, "devices_per_host", row)),
        scale_up_link=links[row["scale_up_link"]],
        scale_out_link=links[row["scale_out_link"]] if row["scale_out_link"] else None,
        nics_per_host=int(_value(ruling, "nics_per_host", row)),
        host_memory_bytes=None if memory is None else int(memory.value),
        pair_links=_pair_links(ruling, row),
        prices=prices,
        evidence=_evidence(ruling),
    )


def _pair_links(ruling: Mapping[str, Fact], row: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    try:
        return pair_links({field: fact.value for field, fact in ruling.items()})
    except ValueError as error:
        raise CatalogError(
            f"{row['slug']}: {error}; meshplan catalog remove {row['slug']}, or import it anew"
        ) from error


def _value(ruling: Mapping[str, Fact], field: str, row: Mapping[str, Any]) -> float:
    if field not in ruling:
        raise CatalogError(f"{row['slug']} has no {field} in the catalog; import one: meshplan catalog import FILE")
    return ruling[field].value


def _evidence(ruling: Mapping[str, Fact]) -> dict[str, Evidence]:
    return {field: fact.evidence for field, fact in ruling.items()}
