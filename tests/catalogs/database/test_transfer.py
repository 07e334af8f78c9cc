"""Export and import: nothing is lost on the way, and a bad file changes nothing."""

from __future__ import annotations

import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Engine

from meshplan.catalogs.database.connection import connect, parse_url, writing
from meshplan.catalogs.database.document import FORMAT
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.seeds import refresh_seeds, seed_document, write_seeds
from meshplan.catalogs.database.tables import metadata
from meshplan.catalogs.database.transfer import export_document, import_document, read_document
from meshplan.catalogs.errors import CatalogError, UnknownEntryError
from meshplan.catalogs.facts import FIELDS, LEVEL_RANK, PEAK_PREFIX
from meshplan.cli.render import Format, rendered_document

SLUGS = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=20)
WORDS = TEXTS.filter(str.strip)
DAYS = st.dates(max_value=date(2026, 11, 22)).map(lambda day: day.isoformat())


@st.composite
def facts(draw: st.DrawFn, kind: str, field: str) -> dict[str, Any]:
    known = next(known for known in FIELDS[kind] if known.name == field)
    value = draw(st.floats(known.low, known.high))
    if known.integer:
        value = float(round(value))
    fact: dict[str, Any] = {
        "field": field,
        "value": value,
        "num_samples": draw(st.integers(0, 9)),
        "level": draw(st.sampled_from(list(LEVEL_RANK))),
        "source": draw(WORDS),
        "date": draw(DAYS),
    }
    if draw(st.booleans()):
        fact |= {"low": value * draw(st.floats(0, 1)), "high": value * draw(st.floats(1, 2))}
    return fact


@st.composite
def fact_lists(draw: st.DrawFn, kind: str) -> list[dict[str, Any]]:
    names = [field.name for field in FIELDS[kind] if field.required and field.name != "usable_memory_bytes"]
    rows = [draw(facts(kind, name)) for name in names]
    if kind == "device":
        memory = next(row for row in rows if row["field"] == "memory_bytes")
        rows.append({**memory, "field": "usable_memory_bytes"})
        rows.append(draw(facts(kind, f"{PEAK_PREFIX}{draw(st.sampled_from(['bf16', 'fp8', 'int4']))}")))
    return rows


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    devices = {
        slug: {
            "name": draw(WORDS),
            "vendor": draw(WORDS),
            "architecture": draw(WORDS),
            "facts": draw(fact_lists("device")),
        }
        for slug in draw(st.lists(SLUGS, min_size=1, max_size=3, unique=True))
    }
    links = {
        slug: {"name": draw(WORDS), "technology": draw(WORDS), "facts": draw(fact_lists("link"))}
        for slug in draw(st.lists(SLUGS, min_size=1, max_size=3, unique=True))
    }
    price = st.fixed_dictionaries(
        {
            "usd_per_hour": st.floats(0.01, 1000),
            "provider": WORDS,
            "region": WORDS,
            "terms": WORDS,
            "source": WORDS,
            "date": DAYS,
        }
    )
    nodes = {}
    for slug in draw(st.lists(SLUGS, max_size=2, unique=True)):
        node: dict[str, Any] = {
            "name": draw(WORDS),
            "device": draw(st.sampled_from(sorted(devices))),
            "scale_up_link": draw(st.sampled_from(sorted(links))),
            "facts": draw(fact_lists("node_type")),
        }
        prices = draw(st.lists(price, max_size=2, unique_by=lambda row: row["source"]))
        nodes[slug] = node | ({"prices": prices} if prices else {})
    document = {"format": FORMAT, "devices": devices, "links": links, "calibrations": []}
    return document | ({"node_types": nodes} if nodes else {})


def empty() -> Engine:
    engine = connect(parse_url(":memory:"))
    with engine.begin() as connection:
        metadata.create_all(connection)
    return engine


@settings(max_examples=25, deadline=None)
@given(documents())
def test_what_is_imported_is_what_is_exported(document: dict[str, Any]) -> None:
    first, second = empty(), empty()
    import_document(first, document)
    exported = export_document(first)
    assert exported == document
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "export.yaml"
        file.write_text(rendered_document(exported, Format.YAML), encoding="utf-8")
        changes = import_document(second, read_document(file))
    assert changes.replaced == changes.unchanged == 0
    assert export_document(second) == document
    again = import_document(second, document)
    assert (again.added, again.replaced) == (0, 0)
    first.dispose()
    second.dispose()


def test_the_seeds_survive_the_round_trip(catalog: Catalog, tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    file.write_text(rendered_document(export_document(catalog.engine), Format.JSON), encoding="utf-8")
    other = empty()
    import_document(other, read_document(file))
    assert Catalog(other).node_types() == catalog.node_types()
    assert set(export_document(other)["devices"]) == set(seed_document()["devices"])


def test_one_entry_goes_out_and_in(catalog: Catalog, empty_engine: Engine) -> None:
    document = export_document(catalog.engine, "h100-sxm-80gb")
    assert list(document) == ["format", "devices"]
    import_document(empty_engine, document)
    assert Catalog(empty_engine).device("h100-sxm-80gb") == catalog.device("h100-sxm-80gb")
    with pytest.raises(UnknownEntryError, match="did you mean"):
        export_document(catalog.engine, "h100-sxm-80")


def test_a_measured_fact_alone_is_added_and_rules(catalog: Catalog) -> None:
    fact = {
        "field": "memory_bandwidth_bytes_per_s",
        "value": 3.0e12,
        "low": 2.9e12,
        "high": 3.1e12,
        "num_samples": 7,
        "level": "measured here",
        "source": "STREAM on our own node",
        "date": "2020-01-01",
    }
    changes = import_document(catalog.engine, {"format": FORMAT, "devices": {"h100-sxm-80gb": {"facts": [fact]}}})
    assert (changes.added, changes.replaced) == (1, 0)
    device = catalog.device("h100-sxm-80gb")
    assert device.memory_bandwidth_bytes_per_s == 3.0e12
    assert device.evidence["memory_bandwidth_bytes_per_s"].num_samples == 7
    assert device.name == "NVIDIA H100 SXM5 80 GB"


def test_new_seeds_replace_old_ones_and_leave_the_users_rows(catalog: Catalog) -> None:
    own = export_document(catalog.engine, "t4")
    own["devices"]["t4"]["name"] = "Our T4 with a better fan"
    import_document(catalog.engine, own)
    with writing(catalog.engine) as connection:
        connection.exec_driver_sql("UPDATE facts SET value = 1 WHERE subject = 'l4' AND origin = 'seed'")
        connection.exec_driver_sql("DELETE FROM devices WHERE slug = 'a30'")
        connection.exec_driver_sql("UPDATE meta SET value = 'another version'")
    assert refresh_seeds(catalog.engine)
    assert not refresh_seeds(catalog.engine)
    assert catalog.device("l4").memory_bandwidth_bytes_per_s == 300e9
    assert catalog.device("a30").architecture == "ampere"
    assert catalog.device("t4").name == "Our T4 with a better fan"


def test_writing_the_seeds_twice_changes_nothing(catalog: Catalog) -> None:
    before = export_document(catalog.engine)
    with writing(catalog.engine) as connection:
        write_seeds(connection)
    assert export_document(catalog.engine) == before


def test_a_malformed_file_lists_every_problem_and_changes_nothing(catalog: Catalog) -> None:
    before = export_document(catalog.engine)
    document = {
        "format": "meshplan-catalog/0",
        "device": {},
        "devices": {
            "Bad Slug": 7,
            "half": {
                "name": "Half",
                "vendor": "me",
                "facts": [{"field": "tdp_w", "value": -1, "date": "x", "level": {}}],
            },
            "l4": {
                "facts": [{"field": "tdp_w", "value": 72, "level": "datasheet", "source": "s", "date": "2026-01-01"}]
            },
        },
        "links": ["nvlink"],
        "node_types": {
            "box": {
                "name": "Box",
                "device": "h100-sxm-80",
                "scale_up_link": ["nvlink4"],
                "colour": "grey",
                "facts": "none",
                "prices": [{"usd_per_hour": "cheap"}],
            }
        },
        "models": {"m": {"name": "M", "family": "llama", "config": []}},
        "calibrations": {"megatron": {}},
    }
    with pytest.raises(CatalogError) as caught:
        import_document(catalog.engine, document, name="bad.yaml")
    message = str(caught.value)
    for words in (
        "in bad.yaml; nothing was imported",
        "device: unknown section; did you mean 'devices'",
        "format: must be 'meshplan-catalog/1'",
        "devices.Bad Slug: a slug is lower case",
        "devices.Bad Slug: must be a mapping",
        "devices.half.architecture: must be a text",
        "devices.half.facts[0]: tdp_w: ",
        "devices.half.facts[0]: tdp_w: no source",
        "devices.half.facts[0]: tdp_w: unknown evidence level {}",
        "devices.half.facts: no fact for 'memory_bytes'",
        "devices.half.facts: no peak",
        "links: must map slugs",
        "node_types.box.device: 'h100-sxm-80' is not among the devices; did you mean 'h100-sxm-80gb'",
        "node_types.box.scale_up_link: ['nvlink4'] is not among the links",
        "node_types.box.colour: unknown key",
        "node_types.box.facts: must be a list",
        "node_types.box.prices[0]: usd_per_hour must be above 0",
        "node_types.box.prices[0].provider: must be a text",
        "models.m.config: must be the mapping",
        "calibrations: must be a list",
    ):
        assert words in message, f"{words}\n--- not in ---\n{message}"
    assert "devices.l4" not in message
    assert export_document(catalog.engine) == before


def test_more_usable_than_nominal_memory_is_refused(catalog: Catalog) -> None:
    document = export_document(catalog.engine, "t4")
    document["devices"] = {"t5": document["devices"]["t4"]}
    for fact in document["devices"]["t5"]["facts"]:
        if fact["field"] == "usable_memory_bytes":
            fact["value"] = 17 * 2**30
    with pytest.raises(CatalogError, match=r"usable_memory_bytes 1\.8\d*e\+10 is more than memory_bytes"):
        import_document(catalog.engine, document)


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_anything_but_a_mapping_is_refused(catalog: Catalog, document: object) -> None:
    with pytest.raises(CatalogError, match="must be a mapping with format: meshplan-catalog/1"):
        import_document(catalog.engine, document)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bad.json", "{", "is not JSON"),
        ("bad.yaml", "a: [", "is not YAML"),
        ("bad.yaml", "!!python/object/apply:os.system ['true']", "is not YAML"),
        ("bad.json", b"\xff\xfe", "cannot read"),
        ("missing.json", None, "cannot read"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: str | bytes | None, words: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CatalogError, match=words):
        read_document(file)


def test_an_export_is_plain_json(catalog: Catalog) -> None:
    document = export_document(catalog.engine)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
