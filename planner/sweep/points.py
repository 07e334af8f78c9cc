"""From a sweep to its points: every question written out, and the digest that it is known by.

The digest covers the whole question: the spec with numbers as numbers, the content of every file that a text of it
names, what is asked and with which options, the state of the catalog, and meshplan's version. The same digest is the
same question, so an answer under it can be used again; a changed trace, price or constant is another question.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.planner.core.budget import DEFAULT_MEMORY_BYTES
from meshplan.planner.core.kinds import kind_of
from meshplan.planner.core.plan import digest, own_version
from meshplan.planner.core.reading.settings import part_of, put, stated
from meshplan.planner.core.reading.spec_reader import plain_numbers, read_spec
from meshplan.planner.sweep.metrics import unknown_metric_problems
from meshplan.planner.sweep.spec import SweepSpec

# Points of one sweep; assumed, not measured on users: at a second each, 3 hours of one core.
MAX_POINTS = 10_000
# Problems after which a sweep is not read on.
MAX_PROBLEMS = 10
# Longer texts are no paths: PATH_MAX of Linux.
_LONGEST_PATH = 4096
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One point of a sweep.

    Args:
        digest: of the whole question.
        values: what the varied fields are here; of those that its point leaves out, what the base has, if it has any.
        document: the spec.
        ask: ``plan`` or ``estimate``.
        options: of the search, as :func:`meshplan.planner.service.make_plan` takes them.
        limit_s: seconds after which it is given up; None for as long as it takes.
    """

    digest: str
    values: Mapping[str, Any]
    document: Mapping[str, Any]
    ask: str
    options: Mapping[str, Any]
    limit_s: float | None


def questions_of(sweep: SweepSpec, spec: Mapping[str, Any], base: Path, *, catalog_state: str) -> tuple[Question, ...]:
    """Every point of a sweep, in order: the points of the list, each with the combinations of the grid.

    Args:
        sweep: what varies.
        spec: the spec that it varies.
        base: folder against which paths in the spec are resolved.
        catalog_state: one word for all that the catalog holds.

    Raises:
        SpecError: too many points, a field that no spec has, a value that it does not take, or a metric that no plan
            predicts; with paths.
    """
    number = max(len(sweep.points), 1) * math.prod(len(values) for values in sweep.over.values())
    if number > MAX_POINTS:
        message = f"{number} points, at most {MAX_POINTS} are taken: vary fewer fields or values"
        raise SpecError.at("over", message, of="the sweep")
    options = _search_options(sweep)
    rest = {"ask": sweep.ask, "options": options, "catalog": catalog_state, "meshplan": own_version()}
    problems: dict[Problem, None] = {}
    found = []
    for values in _combinations(sweep):
        try:
            written = _written(spec, values)
            document = _read(written)
        except SpecError as error:
            problems.update(dict.fromkeys(error.problems))
            if len(problems) >= MAX_PROBLEMS:
                break
            continue
        key = digest({"spec": document, "files": files_of(document, base), **rest})
        left = {field: stated(written, field) for field in sweep.fields if field not in values}
        values |= {field: value for field, value in left.items() if value is not None}
        found.append(
            Question(
                digest=key, values=values, document=document, ask=sweep.ask, options=options, limit_s=sweep.limit_s
            )
        )
    if problems:
        raise SpecError(list(problems)[:MAX_PROBLEMS], of="the questions of the sweep")
    unknown = unknown_metric_problems(sweep.best, sweep.pareto, (kind_of(one.document).name for one in found))
    if unknown:
        raise SpecError(unknown, of="the sweep")
    return tuple(found)


def _search_options(sweep: SweepSpec) -> dict[str, Any]:
    if sweep.ask == "estimate":
        return {}
    options = sweep.options.model_dump(exclude={"memory_limit"})
    return {**options, "memory_limit_bytes": sweep.options.memory_limit or DEFAULT_MEMORY_BYTES}


def _combinations(sweep: SweepSpec) -> Iterator[dict[str, Any]]:
    for point in sweep.points or [{}]:
        for chosen in itertools.product(*sweep.over.values()):
            yield {**point, **dict(zip(sweep.over, chosen, strict=True))}


def _written(spec: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with the values of one point; sections first, so that a part of one that varies by itself is kept."""
    problems = list(_stated_twice(values))
    if problems:
        raise SpecError(problems)
    document = copy.deepcopy(dict(spec))
    for path in sorted(values, key=lambda path: sum(part_of(path, other) is not None for other in values)):
        put(document, path, copy.deepcopy(values[path]))
    return document


def _stated_twice(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Fields of a point that another field of it states, too: one of the two would be named and not asked."""
    for path, section in itertools.permutations(values, 2):
        rest = part_of(path, section)
        value = values[section]
        if rest == "" or (
            rest and isinstance(value, Mapping | list) and stated({"section": value}, f"section.{rest}") is not None
        ):
            yield Problem(path=path, message=f"{section} states it, too; give it in one of them")


def _read(document: dict[str, Any]) -> dict[str, Any]:
    """A written question, held against the model of its kind, with numbers as numbers."""
    model = kind_of(document).spec_model(document)
    if model is None:  # an instance: what is wrong is said when it is answered
        return document
    plain = plain_numbers(model, document)
    read_spec(model, plain)
    return plain


# --- files ------------------------------------------------------------------------------------------------------------


def files_of(document: Mapping[str, Any], base: Path) -> dict[str, str]:
    """Text of the spec that names a file → digest of that file's content."""
    named = sorted({text for text in _texts(document) if 0 < len(text) < _LONGEST_PATH and "\0" not in text})
    found = {}
    for text in named:
        path = base / text
        try:
            if path.is_file():
                state = path.stat()
                found[text] = _content_digest(path, state.st_mtime_ns, state.st_size)
        except OSError:  # a part of it is too long for a name, or may not be looked at: then it is no file to us
            continue
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


@lru_cache(maxsize=256)
def _content_digest(path: Path, _mtime_ns: int, _size: int) -> str:
    content = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            content.update(chunk)
    return content.hexdigest()
