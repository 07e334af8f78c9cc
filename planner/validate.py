"""Predicted against measured: every observation predicted, errors by metric, interval coverage, ranking quality.

The ``task`` of a row names the kind whose ``row_validator`` predicts it (:mod:`meshplan.planner.core.kinds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.planner.core.kinds import KINDS
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.summary import ValidatedRow, Validation, summed_up

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


def validate_rows(rows: Iterable[Mapping[str, Any]], catalog: Catalog, *, traces: Path | None = None) -> Validation:
    """Predict observations with the constants of the catalog.

    Args:
        rows: observations.
        catalog: devices, links and constants.
        traces: folder of the recorded requests that serving runs replayed; None where there is none.
    """
    observed = list(rows)
    tasks = {str(row.get("task")) for row in observed} & set(KINDS)
    made = {task: KINDS[task].offers("row_validator") for task in tasks}
    validators = {task: make(observed, catalog, traces) for task, make in made.items() if make is not None}
    validated = []
    for row in observed:
        try:
            validator = validators.get(str(row.get("task")))
            if validator is None:
                raise UnsupportedError(f"task {row.get('task')!r} is not answered yet")
            validated.append(validator(row))
        except UnsupportedError as error:
            name, group = str(row.get("id", "?")), str(row.get("group", ""))
            validated.append(ValidatedRow(id=name, group=group, status="unsupported", reason=str(error)))
    return summed_up(validated)
