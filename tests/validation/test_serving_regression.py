"""The serving estimator against published measurements that ship with the tests: see README.md beside this file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.machines import read_rows
from meshplan.planner.validation.summary import Validation

OBSERVATIONS = Path(__file__).parent / "serving-observations.jsonl"
# A little above what was seen (README.md): median error by metric.
MEDIAN_ERROR = {"tpot_s": 0.2, "ttft_s": 0.45, "latency_s": 0.3, "output_tokens_per_s": 0.25}
LEAST_IN_INTERVAL = 0.75


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Validation:
    catalog = Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite"))
    return validate_rows(read_rows(OBSERVATIONS), catalog)


def test_every_row_is_answered_but_models_without_a_shape(validation: Validation) -> None:
    refused = [row.reason for row in validation.rows if row.status == "unsupported"]
    assert all("does not describe a transformer" in reason for reason in refused)
    assert validation.coverage >= 0.9


@pytest.mark.parametrize("metric", list(MEDIAN_ERROR))
def test_the_median_error_of_each_metric_does_not_grow(validation: Validation, metric: str) -> None:
    errors = [abs(row.error[metric]) for row in validation.rows if row.status == "ok" and metric in row.error]
    assert len(errors) >= 4
    assert np.median(errors) < MEDIAN_ERROR[metric]


def test_intervals_hold_what_was_measured(validation: Validation) -> None:
    inside = [
        row.predicted[name].low <= row.measured[name] <= row.predicted[name].high
        for row in validation.rows
        if row.status == "ok"
        for name in MEDIAN_ERROR
        if name in row.error
    ]
    assert np.mean(inside) >= LEAST_IN_INTERVAL
