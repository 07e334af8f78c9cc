"""Reads a spec of any kind: every problem at once, each with its path and the closest known key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from meshplan.catalogs.errors import Problem, SpecError, UnitError, closest_names, did_you_mean
from meshplan.catalogs.flag_names import keys_meant
from meshplan.catalogs.units import parse_total_tokens
from meshplan.catalogs.untrusted.commas import without_comma
from meshplan.planner.core.reading.spec_fields import TOTAL_TOKENS, SpecModel, TimeInSeconds, Whole
from meshplan.planner.core.reading.words import refusal_text

# Sections that may have the key which was written in another one; of a key that more have nobody can say what is meant.
MOST_PLACES = 2


def spec_schema(model: type[SpecModel]) -> dict[str, Any]:
    """JSON Schema of a spec (draft 2020-12), quantities as text with their units.

    Args:
        model: the kind of spec.
    """
    schema = model.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"meshplan {schema['properties']['kind']['const']} spec",
        **{key: value for key, value in schema.items() if key != "title"},
    }


SpecT = TypeVar("SpecT", bound=SpecModel)


def read_spec(model: type[SpecT], document: Mapping[str, Any]) -> SpecT:
    """Validate a document of one kind; every problem at once.

    Raises:
        SpecError: with the path and the fix of each problem.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise SpecError([_problem(model, item) for item in _meant(error.errors(include_url=False))]) from None


def plain_numbers(model: type[SpecModel], document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with ``8k``, ``4M``, ``"8"`` and ``50 ms`` as numbers, so that one question has one digest.

    What cannot be read stays as it is, for :func:`read_spec` to report.
    """
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    return {
        key: _plain((fields[key].annotation, *fields[key].metadata), value) if key in fields else value
        for key, value in document.items()
    }


def _plain(types: Sequence[Any], value: Any) -> Any:
    """A value of a field with these types and annotations, texts that say numbers replaced."""
    if isinstance(value, str):
        readers = [one.read for one in _parts(types) if isinstance(one, Whole | TimeInSeconds)]
        for read in [*readers, *([parse_total_tokens] if any(one is TOTAL_TOKENS for one in _parts(types)) else [])]:
            try:
                return read(value)
            except (ValueError, UnitError):
                continue
    elif isinstance(value, Mapping):
        for one in _parts(types):
            if isinstance(one, type) and issubclass(one, SpecModel):
                return plain_numbers(one, value)
        if any(isinstance(one, TimeInSeconds) for one in _parts(types)):
            return {key: _plain(types, item) for key, item in value.items()}
    elif isinstance(value, list):
        return [_plain(types, item) for item in value]
    return value


def _parts(types: Sequence[Any]) -> Iterator[Any]:
    """Every type and annotation inside types such as ``Annotated[list[NodesSpec], …] | None``."""
    for one in types:
        yield one
        yield from _parts([*get_args(one), *getattr(one, "__metadata__", ())])


def read_with_names(
    read: Callable[[Mapping[str, Any]], SpecT],
    document: Mapping[str, Any],
    unknown_names: Callable[[], Sequence[Problem]],
) -> SpecT:
    """``read(document)``; the unknown names of a malformed document are reported together with what is malformed.

    Raises:
        SpecError: one run shows everything that is to be mended.
    """
    try:
        return read(document)
    except SpecError as error:
        raise SpecError([*error.problems, *unknown_names()]) from None


# Parts of an error's place that name one of several types that a field may have.
_WORD = "literal["
_BRANCHES = (_WORD, "list[", "function-", "constrained-")


def _meant(errors: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The errors without those of the type that was not meant: where a field takes a word or a list, a text means the
    word, and all else the list.
    """
    words = {}
    for error in errors:
        depth = next((at for at, part in enumerate(error["loc"]) if str(part).startswith(_WORD)), None)
        if depth is not None:
            words[error["loc"][:depth]] = isinstance(error["input"], str)
    for error in errors:
        loc = error["loc"]
        means_word = next((is_text for field, is_text in words.items() if loc[: len(field)] == field), None)
        if means_word is None or means_word == any(str(part).startswith(_WORD) for part in loc):
            yield error


def _problem(model: type[SpecModel], error: Mapping[str, Any]) -> Problem:
    """One pydantic error as a problem; an unknown key is answered with the closest known one."""
    parts = [part for part in error["loc"] if not str(part).startswith(_BRANCHES)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    if error["type"] == "extra_forbidden" and parts:
        return Problem(path=path, message=f"unknown key{_meant_key(model, parts)}")
    if error["type"] == "missing":
        return Problem(path=path, message="is required")
    return Problem(path=path, message=f"{refusal_text(error)}{without_comma(error.get('input'))}")


def _meant_key(model: type[SpecModel], path: Sequence[Any]) -> str:
    """Where the unknown key at ``path`` belongs, else the known keys of its section that are like it."""
    word, known = str(path[-1]), _known_keys(model, path[:-1])
    places = [] if keys_meant(word, known) else sorted(_places_of(word, model), key=lambda place: place.count("."))
    nearest = [place for place in places if place.count(".") == places[0].count(".")]
    if 1 <= len(nearest) <= MOST_PLACES:
        return f" here: write {' or '.join(nearest)}"
    return did_you_mean(closest_names(word, known))


def _places_of(word: str, model: type[SpecModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of the keys of a kind of spec that ``word`` is, or means."""
    names = {field.alias or name: field for name, field in model.model_fields.items()}
    for name, field in names.items():
        if name == word or name in keys_meant(word, names):
            yield f"{prefix}{name}"
        for inner in _sections(field.annotation)[:1]:
            listed = "[]" if "list" in str(field.annotation).lower() else ""
            yield from _places_of(word, inner, f"{prefix}{name}{listed}.")


def _known_keys(model: type[SpecModel], path: Sequence[Any]) -> list[str]:
    """Keys that a spec of the kind ``model`` may have at ``path``; list positions are stepped over."""
    at: Any = model
    for part in path:
        if isinstance(part, int) or part not in at.model_fields:
            continue
        inner = _sections(at.model_fields[part].annotation)
        at = inner[0] if inner else at
    return [field.alias or name for name, field in at.model_fields.items()]


def _sections(annotation: Any) -> list[type[SpecModel]]:
    """The spec models inside a field's type, such as ``Annotated[list[NodesSpec], …] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, SpecModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _sections(part)]
