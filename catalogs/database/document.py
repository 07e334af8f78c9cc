"""The exchange form of the catalog, as plain JSON, and what can be wrong with it. No SQL here.

Seeds, ``catalog import`` and ``catalog export`` all speak this form::

    format: meshplan-catalog/1
    devices:      {SLUG: {name, vendor, architecture, facts: [FACT…]}}
    links:        {SLUG: {name, technology, facts: [FACT…]}}
    node_types:   {SLUG: {name, device, scale_up_link, scale_out_link, facts: [FACT…], prices: [PRICE…]}}
    models:       {SLUG: {name, family, config: {…a Hugging Face config.json…}, source, date}}
    calibrations: [{framework, architecture, document, source, date}]

with ``FACT = {field, value, level, source, date, num_samples?, low?, high?}`` (SI units) and ``PRICE = {usd_per_hour,
provider, region, terms, source, date}``. An entry that the catalog already has may come with ``facts`` or ``prices``
alone: that is how measured numbers are added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from meshplan.catalogs.constants.checks import calibration_problems
from meshplan.catalogs.errors import Problem, closest_names, did_you_mean
from meshplan.catalogs.facts import FIELDS, PEAK_PREFIX, fact_problems, source_problems
from meshplan.catalogs.meshed import pair_links
from meshplan.catalogs.untrusted.text import control_character

FORMAT = "meshplan-catalog/1"
SLUG = r"[a-z0-9]+(?:[.-][a-z0-9]+)*"
_PRICE_TEXTS = ("provider", "region", "terms")
# Above this a price is a typo: the dearest node type, a rack of 72 devices, rents for some hundreds of USD/h.
MOST_USD_PER_HOUR = 1e5
_MAX_TEXT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One group of entries that have facts.

    Args:
        name: key in the document, and name of the table.
        kind: ``subject_kind`` of its facts.
        columns: texts that an entry needs.
        optional: texts that an entry may have.
        references: column → section where that slug must exist.
    """

    name: str
    kind: str
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()
    references: tuple[tuple[str, str], ...] = ()


SECTIONS: tuple[Section, ...] = (
    Section(name="devices", kind="device", columns=("name", "vendor", "architecture")),
    Section(name="links", kind="link", columns=("name", "technology")),
    Section(
        name="node_types",
        kind="node_type",
        columns=("name", "device", "scale_up_link"),
        optional=("scale_out_link",),
        references=(("device", "devices"), ("scale_up_link", "links"), ("scale_out_link", "links")),
    ),
)
_TOP_LEVEL = ("format", *(section.name for section in SECTIONS), "models", "calibrations")


def problems_of(document: object, known: Mapping[str, frozenset[str]]) -> list[Problem]:
    """Everything that is wrong with a document, in its order.

    Args:
        document: what a JSON or YAML reader returned.
        known: section name → slugs that the catalog has already.
    """
    if not isinstance(document, Mapping):
        return [Problem(path="", message=f"must be a mapping with format: {FORMAT}, not {type(document).__name__}")]
    found = [
        Problem(path=str(key), message=f"unknown section{did_you_mean(closest_names(str(key), _TOP_LEVEL))}")
        for key in document
        if key not in _TOP_LEVEL
    ]
    if document.get("format") != FORMAT:
        found.append(Problem(path="format", message=f"must be {FORMAT!r}, not {document.get('format')!r}"))
    for section in SECTIONS:
        found.extend(_section_problems(section, document, known))
    found.extend(_model_problems(document))
    found.extend(_calibration_problems(document))
    return found


def future_problems(document: Mapping[str, Any], latest: str) -> Iterator[Problem]:
    """Numbers that claim to be from after ``latest``, an ISO day: the newest counts, so they would rule for ever.

    Args:
        document: without other problems.
        latest: the last day that a number can be from.
    """
    for section in SECTIONS:
        for slug, entry in document.get(section.name, {}).items():
            for kind in ("facts", "prices"):
                for index, row in enumerate(entry.get(kind, [])):
                    if row["date"] > latest:
                        path = f"{section.name}.{slug}.{kind}[{index}]"
                        yield Problem(path=path, message=f"date {row['date']} is in the future (after {latest})")
    rows = [(f"models.{slug}", model) for slug, model in document.get("models", {}).items()]
    rows += [(f"calibrations[{index}]", row) for index, row in enumerate(document.get("calibrations", []))]
    for path, row in rows:
        if row["date"] > latest:
            yield Problem(path=path, message=f"date {row['date']} is in the future (after {latest})")


def _section_problems(
    section: Section, document: Mapping[str, Any], known: Mapping[str, frozenset[str]]
) -> Iterator[Problem]:
    entries = document.get(section.name, {})
    if not isinstance(entries, Mapping):
        yield Problem(path=section.name, message=f"must map slugs to entries, not {type(entries).__name__}")
        return
    for slug, entry in entries.items():
        path = f"{section.name}.{slug}"
        yield from _slug_problems(path, slug)
        if not isinstance(entry, Mapping):
            yield Problem(path=path, message=f"must be a mapping, not {type(entry).__name__}")
            continue
        exists = slug in known.get(section.name, frozenset())
        described = any(column in entry for column in (*section.columns, *section.optional))
        if described or not exists:
            yield from _text_problems(path, entry, section.columns)
            yield from _reference_problems(section, path, entry, document, known)
        allowed = (*section.columns, *section.optional, "facts", *(("prices",) if section.name == "node_types" else ()))
        yield from _unknown_keys(path, entry, allowed)
        yield from _facts_problems(section.kind, path, entry.get("facts", []), complete=not exists)
        if section.name == "node_types":
            yield from _prices_problems(path, entry.get("prices", []))


def _reference_problems(
    section: Section,
    path: str,
    entry: Mapping[str, Any],
    document: Mapping[str, Any],
    known: Mapping[str, frozenset[str]],
) -> Iterator[Problem]:
    for column, target in section.references:
        slug = entry.get(column)
        if slug is None:
            continue
        there = known.get(target, frozenset()) | set(_mapping(document.get(target)))
        if not isinstance(slug, str) or slug not in there:
            hint = did_you_mean(closest_names(str(slug), there))
            yield Problem(path=f"{path}.{column}", message=f"{slug!r} is not among the {target}{hint}")


def _facts_problems(kind: str, path: str, facts: object, *, complete: bool) -> Iterator[Problem]:
    if not _is_list(facts):
        yield Problem(path=f"{path}.facts", message="must be a list of facts")
        return
    values: dict[str, float] = {}
    sound = True
    for index, fact in enumerate(facts):
        if not isinstance(fact, Mapping):
            yield Problem(path=f"{path}.facts[{index}]", message=f"must be a mapping, not {type(fact).__name__}")
            sound = False
            continue
        for message in fact_problems(kind, fact):
            yield Problem(path=f"{path}.facts[{index}]", message=message)
            sound = False
        values.setdefault(str(fact.get("field")), fact.get("value", 0))
    if not complete:
        return
    for field in FIELDS[kind]:
        if field.required and field.name not in values:
            yield Problem(path=f"{path}.facts", message=f"no fact for {field.name!r}, which every {kind} needs")
    if kind == "device" and not any(name.startswith(PEAK_PREFIX) for name in values):
        yield Problem(path=f"{path}.facts", message=f"no peak; give at least one fact like '{PEAK_PREFIX}bf16'")
    if kind == "node_type" and sound and {"num_hosts", "devices_per_host"} <= values.keys():
        try:
            pair_links(values)
        except ValueError as error:
            yield Problem(path=f"{path}.facts", message=str(error))
    usable, nominal = values.get("usable_memory_bytes"), values.get("memory_bytes")
    if sound and usable is not None and nominal is not None and usable > nominal:
        message = f"usable_memory_bytes {usable:g} is more than memory_bytes {nominal:g}"
        yield Problem(path=f"{path}.facts", message=message)


def _prices_problems(path: str, prices: object) -> Iterator[Problem]:
    if not _is_list(prices):
        yield Problem(path=f"{path}.prices", message="must be a list of prices")
        return
    for index, price in enumerate(prices):
        place = f"{path}.prices[{index}]"
        if not isinstance(price, Mapping):
            yield Problem(path=place, message=f"must be a mapping, not {type(price).__name__}")
            continue
        yield from _text_problems(place, price, _PRICE_TEXTS)
        usd = price.get("usd_per_hour")
        if not isinstance(usd, (int, float)) or isinstance(usd, bool) or not 0 < usd <= MOST_USD_PER_HOUR:
            message = f"usd_per_hour must be above 0 and at most {MOST_USD_PER_HOUR:g} USD/h for a node, not {usd!r}"
            yield Problem(path=place, message=message)
        for message in source_problems("price", price):
            yield Problem(path=place, message=message)


def _model_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    models = document.get("models", {})
    if not isinstance(models, Mapping):
        yield Problem(path="models", message=f"must map slugs to models, not {type(models).__name__}")
        return
    for slug, model in models.items():
        path = f"models.{slug}"
        yield from _slug_problems(path, slug)
        if not isinstance(model, Mapping):
            yield Problem(path=path, message=f"must be a mapping, not {type(model).__name__}")
            continue
        yield from _text_problems(path, model, ("name", "family"))
        yield from _unknown_keys(path, model, ("name", "family", "config", "source", "date"))
        if not isinstance(model.get("config"), Mapping):
            yield Problem(path=f"{path}.config", message="must be the mapping of a Hugging Face config.json")
        for message in source_problems("model", model):
            yield Problem(path=path, message=message)


def _calibration_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    calibrations = document.get("calibrations", [])
    if not _is_list(calibrations):
        yield Problem(path="calibrations", message="must be a list")
        return
    for index, calibration in enumerate(calibrations):
        path = f"calibrations[{index}]"
        if not isinstance(calibration, Mapping):
            yield Problem(path=path, message=f"must be a mapping, not {type(calibration).__name__}")
            continue
        yield from _text_problems(path, calibration, ("framework", "architecture"))
        constants = calibration.get("document")
        if not isinstance(constants, Mapping):
            yield Problem(path=f"{path}.document", message="must be a mapping of named constants")
        else:
            names = (calibration.get("framework"), calibration.get("architecture"))
            for message in calibration_problems(*names, constants):
                yield Problem(path=f"{path}.document", message=message)
        for message in source_problems("calibration", calibration):
            yield Problem(path=path, message=message)


def _slug_problems(path: str, slug: object) -> Iterator[Problem]:
    if not isinstance(slug, str) or not re.fullmatch(SLUG, slug):
        yield Problem(path=path, message="a slug is lower case letters and digits joined by '-' or '.'")


def _text_problems(path: str, entry: Mapping[str, Any], columns: Sequence[str]) -> Iterator[Problem]:
    for column in columns:
        text = entry.get(column)
        if not isinstance(text, str) or not text.strip():
            yield Problem(path=f"{path}.{column}", message=f"must be a text, not {text!r}")
        elif len(text) > _MAX_TEXT or (sign := control_character(text)) is not None:
            what = f"{len(text)} characters; at most {_MAX_TEXT}" if len(text) > _MAX_TEXT else f"the sign {sign}"
            yield Problem(path=f"{path}.{column}", message=f"holds {what}")


def _unknown_keys(path: str, entry: Mapping[str, Any], allowed: Sequence[str]) -> Iterator[Problem]:
    for key in entry:
        if key not in allowed:
            hint = did_you_mean(closest_names(str(key), allowed))
            yield Problem(path=f"{path}.{key}", message=f"unknown key{hint}")


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
