"""A study as people read it."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.catalogs.database.studies.points import Point, PointState
from meshplan.cli.studies.report import sweep_report
from meshplan.planner.sweep.table import study_rows

PREDICTED = {"requests_per_s": 12.5, "output_tokens_per_s_per_device": 1234.0, "tpot_mean_s": 0.0123}


def study(values: dict[str, Any]) -> dict[str, Any]:
    asked = {"kind": "serving", "objective": "max_request_rate", "best": None, "group_by": [], "pareto": None}
    return {**asked, "fields": list(values), "points": [{"digest": "a", "values": values}]}


@pytest.mark.parametrize(
    "values",
    [
        {"objective": "max_request_rate", "model": "llama-3.1-70b"},
        {"objective": "max_request_rate", "model": "llama-3.1-70b", "slo.ttft_p99_s": 0.5, "slo.tpot_p95_s": 0.05},
        {"model": "llama-3.1-70b"},
    ],
)
def test_a_study_fits_eighty_columns_and_names_its_plans(values: dict[str, Any]) -> None:
    answer = {"status": "optimal", "gap": 0.001, "predicted": PREDICTED}
    common: dict[str, Any] = {"owner": "me", "attempts": 1, "deaths": 0, "problem": None}
    point = Point(digest="a", state=PointState.DONE, answer=answer, plan_id="c7f373f3d337", **common)
    asked = study(values)
    text = sweep_report(asked, study_rows(asked, {"a": point}))
    assert max(map(len, text.splitlines())) <= 80
    assert "12.5" in text
    assert "c7f373f3d337" in text
