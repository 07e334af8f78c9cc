"""The schemas of what is sent and answered, by name: specs of every kind, measured figures, entries, jobs, problems.

A spec's schema is that of its reader. What it cannot say – names that must be in the catalog, keys that exclude each
other, ranges of quantities that are written with their units – is found when the spec is read, and answered with 422.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from meshplan.catalogs.database.document import FORMAT, MOST_USD_PER_HOUR, SECTIONS, SLUG
from meshplan.catalogs.database.job_rows import JobState
from meshplan.catalogs.facts import FIELDS, LEVEL_RANK
from meshplan.planner.core.kinds import KINDS, Kind

_DAY = {"type": "string", "format": "date", "examples": ["2026-11-21"]}
_TEXT = {"type": "string", "pattern": r"\S"}
_CITED = {"source": {**_TEXT, "description": "citation"}, "date": _DAY}
_OBJECT = {"type": "object"}

PROBLEM: Mapping[str, Any] = {
    "title": "Problem",
    "description": "RFC 9457; `errors` says where each problem of a spec is, `exit_code` what `meshplan` exits with.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "exit_code": {"type": "integer"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["path", "message"],
                "properties": {"path": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}
_MOMENT = {"type": ["string", "null"], "format": "date-time"}
JOB: Mapping[str, Any] = {
    "title": "Job",
    "description": "A search: how far it is, and what it has found.",
    "type": "object",
    "required": ["job_id", "state", "cancel_asked", "submitted_at", "attempts", "progress", "plan_id", "problem"],
    "properties": {
        "job_id": {"type": "string"},
        "state": {"enum": [state.value for state in JobState]},
        "cancel_asked": {"type": "boolean"},
        "submitted_at": _MOMENT,
        "started_at": _MOMENT,
        "finished_at": _MOMENT,
        "attempts": {"type": "integer", "minimum": 0},
        "progress": {**_OBJECT, "description": "incumbent, bound and seconds, as the search told them last"},
        "answer": {"type": ["object", "null"], "description": "the document that says that there is no plan"},
        "plan_id": {"type": ["string", "null"]},
        "plan": {"type": ["string", "null"], "description": "where the plan lies"},
        "problem": {"anyOf": [{"$ref": "#/components/schemas/Problem"}, {"type": "null"}]},
        "num_askers": {"type": "integer", "description": "clients that want its answer"},
        "num_ahead": {"type": "integer", "minimum": 0, "description": "jobs that wait before it, while it waits"},
    },
}
MEASURED: Mapping[str, Any] = {
    "type": "object",
    "description": "Metric that the plan predicts → its measured value in SI units.",
    "minProperties": 1,
    "propertyNames": {"pattern": r"^[A-Za-z][\w.]*$"},
    "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
    "examples": [{"iteration_s": 4.2}],
}
ROW: Mapping[str, Any] = {
    "type": "object",
    "description": "A measured run; one that cannot be predicted is answered with the reason.",
    "properties": {"task": {"description": f"kind of the run: {', '.join(KINDS)}"}},
}
ROWS: Mapping[str, Any] = {
    "type": "string",
    "description": "One JSON object a line: measured runs.",
    "pattern": r"^\s*(\{.*\}\s*)+$",
}


def schemas() -> dict[str, Any]:
    """Every schema by its name.

    ``Spec`` is a spec of any kind and ``PinnedSpec`` of one that can be estimated, told apart by ``kind``.
    """
    specs, parts = _specs()
    return {
        **parts,
        "Spec": _by_kind(specs, "A question; `GET /schema/{kind}` has its keys alone."),
        "PinnedSpec": _by_kind(
            {name: schema for name, schema in specs.items() if KINDS[name].offers("estimate") is not None},
            "A question whose choices are pinned under `fixed`.",
        ),
        "CatalogDocument": _catalog_document(),
        "MeasuredFigures": dict(MEASURED),
        "MeasuredRow": dict(ROW),
        "Job": dict(JOB),
        "Problem": dict(PROBLEM),
    }


def _specs() -> tuple[dict[str, str], dict[str, Any]]:
    """Kind → name of its schema, and the schemas by name, those of their sections included."""
    models = {kind.name: model for kind in KINDS.values() if (model := kind.offers("SPEC")) is not None}
    references, made = models_json_schema(
        [(model, "validation") for model in models.values()], ref_template="#/components/schemas/{model}"
    )
    parts = dict(made["$defs"])
    names = {name: references[model, "validation"]["$ref"].rpartition("/")[2] for name, model in models.items()}
    for kind in KINDS.values():
        if (schema := kind.offers("SCHEMA")) is None:
            continue
        instance = _name(kind, "Instance")
        parts[instance] = {key: value for key, value in schema.items() if key != "$schema"}
        if kind.name in names:  # a question of this kind is either of the two
            either = [{"$ref": f"#/components/schemas/{name}"} for name in (names[kind.name], instance)]
            instance = _name(kind, "Question")
            parts[instance] = {"anyOf": either}
        names[kind.name] = instance
    return names, parts


def _name(kind: Kind, what: str) -> str:
    """``RankMappingInstance`` of ``rank-mapping``."""
    return "".join(part.capitalize() for part in kind.name.split("-")) + what


def _by_kind(specs: Mapping[str, str], description: str) -> dict[str, Any]:
    places = {kind: f"#/components/schemas/{name}" for kind, name in specs.items()}
    return {
        "description": description,
        "oneOf": [{"$ref": place} for place in places.values()],
        "discriminator": {"propertyName": "kind", "mapping": places},
    }


def _catalog_document() -> dict[str, Any]:
    """The exchange form of :mod:`meshplan.catalogs.database.document`."""
    sections = {section.name: _entries(section.kind, section.columns, section.optional) for section in SECTIONS}
    model = {"name": _TEXT, "family": _TEXT, "config": {**_OBJECT, "description": "a Hugging Face config.json"}}
    calibration = {"framework": _TEXT, "architecture": _TEXT, "document": _OBJECT}
    return {
        "title": "CatalogDocument",
        "description": "A document of `meshplan catalog export`: all of it is imported, or nothing.",
        "properties": {
            "format": {"const": FORMAT},
            **sections,
            "models": _by_slug(_closed({**model, **_CITED}, required=[*model, *_CITED])),
            "calibrations": {"type": "array", "items": _closed({**calibration, **_CITED}, required=[*calibration])},
        },
        "required": ["format"],
        "type": "object",
        "additionalProperties": False,
    }


def _entries(kind: str, columns: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    known = {"enum": [field.name for field in FIELDS[kind]]}
    fact = {
        "field": known,
        "value": {"type": "number", "description": "in SI units"},
        "level": {"enum": [*LEVEL_RANK]},
        **_CITED,
        "num_samples": {"type": "integer", "minimum": 0},
        "low": {"type": ["number", "null"]},
        "high": {"type": ["number", "null"]},
    }
    keys: dict[str, Any] = dict.fromkeys((*columns, *optional), _TEXT)
    keys["facts"] = {"type": "array", "items": {**_OBJECT, "properties": fact, "required": [*fact][:5]}}
    if kind == "node_type":
        usd = {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_USD_PER_HOUR}
        price = {"usd_per_hour": usd, "provider": _TEXT, "region": _TEXT, "terms": _TEXT, **_CITED}
        keys["prices"] = {"type": "array", "items": {**_OBJECT, "properties": price, "required": [*price]}}
    # An entry that the catalog has may come with facts or prices alone.
    return _by_slug(_closed(keys, required=[]))


def _by_slug(entry: dict[str, Any]) -> dict[str, Any]:
    return {**_OBJECT, "propertyNames": {"pattern": f"^{SLUG}$"}, "additionalProperties": entry}


def _closed(properties: Mapping[str, Any], *, required: list[str]) -> dict[str, Any]:
    return {**_OBJECT, "properties": dict(properties), "required": required, "additionalProperties": False}
