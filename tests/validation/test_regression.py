"""The estimator against published measurements that ship with the tests: it may not get worse unnoticed.

Which rows, and what was seen: see README.md beside this file. The constants in the catalog were fitted to these runs
among others, so this guards against regressions; the honest error is the one that ``meshplan calibrate`` prints for
sources held out whole. The error of every row is a golden: none may change unnoticed, for better or worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.machines import read_rows
from meshplan.planner.validation.summary import MetricSummary, Validation

OBSERVATIONS = Path(__file__).parent / "observations.jsonl"
# A little above what was seen (README.md).
MEDIAN_STEP_ERROR, MEAN_STEP_ERROR = 0.065, 0.090
MEDIAN_MEMORY_ERROR = 0.02
# Runs that worked although the safe bound is beyond their device: too many, and only to be lowered.
REJECTED = 11


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Validation:
    catalog = Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite"))
    return validate_rows(read_rows(OBSERVATIONS), catalog)


def over_all(validation: Validation, metric: str) -> MetricSummary:
    return next(item for item in validation.summary if (item.group, item.metric) == ("all", metric))


def test_every_row_is_answered(validation: Validation) -> None:
    assert [row.reason for row in validation.rows if row.status != "ok"] == []
    assert validation.coverage == 1.0


def test_the_error_of_each_row_is_known(validation: Validation, golden: Callable[[str, str], None]) -> None:
    lines = ["run: predicted / measured − 1; in brackets the 90 % interval"]
    for row in validation.rows:
        for metric in ("iteration_s", "peak_memory_bytes"):
            if metric in row.error:
                low, high = (
                    getattr(row.predicted[metric], end) / row.measured[metric] - 1.0 for end in ("low", "high")
                )
                lines.append(f"{row.id} {metric}: {row.error[metric]:+.1%} [{low:+.1%}, {high:+.1%}]")
    golden("validation/training_errors.txt", "\n".join(lines) + "\n")


def test_errors_of_the_step_time_do_not_grow(validation: Validation) -> None:
    summary = over_all(validation, "iteration_s")
    assert summary.n == 38
    assert summary.median_ape < MEDIAN_STEP_ERROR
    assert summary.mape < MEAN_STEP_ERROR
    assert abs(summary.signed_median) < MEDIAN_STEP_ERROR
    assert summary.interval_coverage >= 0.8
    assert summary.spearman is not None
    assert summary.spearman > 0.98


def test_errors_of_peaks_do_not_grow_and_none_exceeds_the_safe_bound(validation: Validation) -> None:
    assert over_all(validation, "peak_memory_bytes").median_ape < MEDIAN_MEMORY_ERROR
    exceeded = [
        row.id
        for row in validation.rows
        if "peak_memory_bytes" in row.error
        and row.measured["peak_memory_bytes"] > row.predicted["peak_memory_bytes"].high
    ]
    assert exceeded == []


def test_runs_that_worked_and_are_called_too_large_become_no_more(validation: Validation) -> None:
    """Each of these runs fitted its devices. The bound is what is, not what should be: see README.md."""
    rejected = [row.id for row in validation.rows if row.oom]
    assert len(rejected) <= REJECTED, rejected


def test_every_source_is_there_with_its_licence() -> None:
    rows = list(read_rows(OBSERVATIONS))
    assert all(row["source"]["url"].startswith("https://") and row["license"] for row in rows)
    assert len({row["id"] for row in rows}) == len(rows) == 44
    assert max(Counter(row["framework"]["name"] for row in rows).values()) <= 8
