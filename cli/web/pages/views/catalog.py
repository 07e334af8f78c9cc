"""Entries of the catalog on their page: tables to look through, and one entry with every fact and its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.facts import format_value
from meshplan.cli.answers.entries import Section
from meshplan.cli.commands.catalog import LISTINGS
from meshplan.cli.render import Row
from meshplan.cli.web.pages.views import evidence
from meshplan.cli.web.pages.views.tables import table
from meshplan.planner.core.text import counted

# Where the row of a section has the name of an entry.
_NAME = {Section.PRICES: "node_type"}


def section_table(section: Section, rows: Sequence[Row]) -> dict[str, Any]:
    """The entries as a table whose first column leads to each; more than fit a page are counted by the caption."""
    found = table(
        rows, LISTINGS[section], caption=f"{section.value.capitalize()}: {counted(len(rows), 'entry', 'entries')}"
    )
    for shown, row in zip(found["rows"], rows, strict=True):
        shown["name"] = str(row[_NAME.get(section, "slug")])
    return found


def entry_view(document: Mapping[str, Any]) -> dict[str, Any]:
    """One entry.

    Args:
        document: as ``meshplan catalog show`` prints it.
    """
    elsewhere = {"kind", "facts", "prices", "config", "values"}
    return {
        "name": str(document["slug"]),
        "kind": str(document["kind"]).replace("_", " "),
        "texts": [(key.replace("_", " "), _text(value)) for key, value in document.items() if key not in elsewhere],
        "facts": [_fact(fact) for fact in document.get("facts", ())],
        "prices": [{key: _text(value) for key, value in price.items()} for price in document.get("prices", ())],
        "config": [(key, _text(value)) for key, value in sorted((document.get("config") or {}).items())],
        "figures": [(key.replace("_", " "), _figure(key, value)) for key, value in document.get("values", {}).items()],
        "measured": any(evidence.level_of(fact["level"]) == evidence.MEASURED for fact in document.get("facts", ())),
    }


def _fact(fact: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "field": str(fact["field"]),
        "value": format_value(fact["field"], fact["value"]),
        "between": ""
        if fact["low"] is None
        else f"{format_value(fact['field'], fact['low'])} … {format_value(fact['field'], fact['high'])}",
        "level": evidence.level_of(str(fact["level"])),
        "words": str(fact["level"]),
        "rules": bool(fact["rules"]),
        "date": str(fact["date"] or ""),
        "source": str(fact["source"]),
    }


def _figure(key: str, value: Any) -> str:
    """A number with its unit; of nested records the numbers by their names."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_figure(name, one)}" for name, one in value.items() if one != "")
    if isinstance(value, list | tuple):
        return "; ".join(_figure(key, one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_value(key, value) if isinstance(value, int | float) else _text(value)


def _text(value: Any) -> str:
    return "–" if value is None else str(value)
