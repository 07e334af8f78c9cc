"""Stored plans: a plan is saved once under its digest, and measurements are attached to it.

A handle is a plan's tag, its id or the beginning of it, ``latest``, or the path of a plan's JSON file. A stored or
written plan carries its own digest; one that was edited by hand is refused, because launcher files, comparisons and
recorded runs would otherwise refer to a plan that was never made.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import Problem, SpecError, StoreError, closest_names, did_you_mean
from meshplan.catalogs.untrusted.documents import DocumentError
from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.measurable import measurable
from meshplan.planner.core.plan import CLOCK_FIELDS, NOT_IN_DIGEST, PLAN_ID_LENGTH, Plan, digest
from meshplan.planner.core.plan_document import PlanDocument, document_problems
from meshplan.planner.core.reading.documents import read_document
from meshplan.planner.core.reading.doors import PLAN, other_than

if TYPE_CHECKING:
    from meshplan.catalogs.database.plan_rows import PlanRows, RecordedRun

_LISTED_PROBLEMS = 8
PLAN_FILE = "plan.json"  # among the launcher files: planner/emit/artifact.py


def save(plan: Plan, rows: PlanRows, *, name: str = "", tag: str | None = None) -> bool:
    """Store a plan; whether it was new (the same question with the same answer is the same plan).

    Args:
        plan: what to store.
        rows: where.
        name: what the user calls it.
        tag: unique handle; it moves here when another plan has it.
    """
    return rows.insert(plan.to_document(), name=name, tag=tag)


def load(handle: str, rows: PlanRows) -> Plan:
    """The plan that ``handle`` means.

    Raises:
        StoreError: no such plan, several, or one that was edited.
        SpecError: the file is missing or malformed.
    """
    if is_file_handle(handle):
        path = Path(handle)
        _refuse_folder(path)
        return plan_from_document(read_document(path), name=str(path))
    try:
        document = rows.get(handle).document
    except StoreError:
        _refuse_folder(Path(handle))  # a tag comes first: folders are often called like the tag of what is in them
        raise
    return plan_from_document(document, name=f"stored plan {handle}")


def _refuse_folder(path: Path) -> None:
    """Name the plan in a folder of launcher files."""
    if (path / PLAN_FILE).is_file():
        raise StoreError(f"{path} is a folder; its plan: {path / PLAN_FILE}")


def is_file_handle(handle: str) -> bool:
    """Whether ``handle`` is a path rather than the name of a stored plan."""
    is_written = handle.endswith((".json", ".jsonl", ".yaml", ".yml")) and Path(handle).is_file()
    return is_written or handle.endswith(".json") or os.sep in handle


def plan_from_document(document: Mapping[str, Any], *, name: str) -> Plan:
    """Read a plan's JSON, hold it against the model of its kind and against its own digest.

    Raises:
        StoreError: it is no plan, or its content is not what its id was made of.
    """
    other = other_than(document, PLAN, name=name)
    if other:
        raise StoreError(other)
    kind = KINDS.get(str(document.get("kind")))
    try:
        problems = document_problems(kind.plan_model() if kind else PlanDocument, document)
    except DocumentError as error:
        raise StoreError(f"{name} is refused: {error}") from error
    if kind is None and not problems:
        problems = [f"kind: must be one of {', '.join(KINDS)}, not {document['kind']!r}"]
    if problems:
        more = len(problems) - _LISTED_PROBLEMS
        listed = "\n".join(f"  - {problem}" for problem in problems[:_LISTED_PROBLEMS])
        raise StoreError(
            f"{name} is not the JSON of a plan; 'meshplan plan --format json' writes one:\n{listed}"
            + (f"\n  and {more} more" if more > 0 else "")
        )
    actual = _content_id(document)
    if document["plan_id"] != actual:
        raise StoreError(
            f"{name} says it is plan {document['plan_id']!r}, its content is that of {actual!r}: it was edited; "
            "plan again"
        )
    return Plan.from_document(document)


def _content_id(document: Mapping[str, Any]) -> str:
    """The id that belongs to the document as it stands, whichever version of meshplan wrote it."""
    solution = {key: value for key, value in document["solution"].items() if key not in CLOCK_FIELDS}
    content = {key: value for key, value in document.items() if key not in NOT_IN_DIGEST}
    return digest({**content, "solution": solution})[:PLAN_ID_LENGTH]


def record(handle: str, measured: Mapping[str, Any], rows: PlanRows) -> RecordedRun:
    """Attach what was measured to a stored plan.

    Args:
        handle: of a stored plan.
        measured: metric → value in SI units, the metrics being those that the plan predicts.
        rows: where it is stored.

    Raises:
        SpecError: unknown metrics or values that are no positive numbers, all of them.
        StoreError: no such stored plan.
    """
    plan = plan_from_document(rows.get(handle).document, name=f"stored plan {handle}")
    problems = measured_problems(plan, measured)
    if problems:
        raise SpecError(problems, of="what was measured")
    return rows.record(handle, measured)


def measured_problems(plan: Plan, measured: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with figures that somebody says were measured of a plan."""
    if not measured:
        return [Problem(path="", message=f"no metric is given; a plan predicts {', '.join(sorted(measurable(plan)))}")]
    return [problem for name, value in measured.items() for problem in _metric_problems(plan, name, value)]


def _metric_problems(plan: Plan, name: str, value: object) -> list[Problem]:
    predicted = measurable(plan)
    if name not in predicted:
        known = sorted(predicted)
        hint = did_you_mean(closest_names(name, known)) or f"; the plan predicts {', '.join(known) or 'no metric'}"
        return [Problem(path=name, message=f"unknown metric{hint}")]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        return [Problem(path=name, message=f"must be a positive number in SI units, not {value!r}")]
    # start-up: a plan is stored without it
    from meshplan.planner.validation.recorded import absurd

    why = absurd(float(value), predicted[name])
    return [Problem(path=name, message=why)] if why else []
