"""Rows of measured runs go to the kind that their task names; a new kind needs no edit of the validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from toy_kind import register_coin

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.plan import Interval
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.summary import ValidatedRow

ROWS = [{"id": "a", "task": "coin", "heads": 3}, {"id": "b", "task": "coin"}, {"id": "c", "task": "dice"}]


def tossed(
    rows: Iterable[Mapping[str, Any]], catalog: Catalog, traces: Path | None
) -> Callable[[Mapping[str, Any]], ValidatedRow]:
    del catalog, traces
    assert len(list(rows)) == len(ROWS)  # rules may look at all rows of the files

    def validated(row: Mapping[str, Any]) -> ValidatedRow:
        if "heads" not in row:
            raise UnsupportedError("nobody counted")
        return ValidatedRow(
            id=row["id"],
            group="",
            labels={},
            status="ok",
            predicted={"heads": Interval(value=4.0, low=2.0, high=6.0)},
            measured={"heads": row["heads"]},
            error={"heads": 4.0 / row["heads"] - 1.0},
            breakdown_s={},
        )

    return validated


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog.open(str(tmp_path / "catalog.sqlite"))


def test_a_new_kind_predicts_its_own_rows(monkeypatch: pytest.MonkeyPatch, catalog: Catalog) -> None:
    register_coin(monkeypatch, row_validator=tossed)
    validation = validate_rows(ROWS, catalog)
    assert [(row.id, row.status, row.reason) for row in validation.rows] == [
        ("a", "ok", ""),
        ("b", "unsupported", "nobody counted"),
        ("c", "unsupported", "task 'dice' is not answered yet"),
    ]
    assert validation.coverage == pytest.approx(1 / 3)
    assert validation.summary[0].mape == pytest.approx(1 / 3)


@pytest.mark.parametrize("task", ["coin", "gpu-allocation", "", None, 3, ["training"], {"training": 1}])
def test_tasks_without_a_validator_are_refused(monkeypatch: pytest.MonkeyPatch, catalog: Catalog, task: object) -> None:
    """A kind may have no measured runs, and a task may be anything that JSON can say."""
    register_coin(monkeypatch)
    (row,) = validate_rows([{"id": "a", "task": task}], catalog).rows
    assert (row.status, row.reason) == ("unsupported", f"task {task!r} is not answered yet")
