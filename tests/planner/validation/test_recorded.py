"""Which recordings are believed: another unit is refused, another plan and outliers are left out with the reason."""

from __future__ import annotations

import math

import pytest

from meshplan.planner.core.plan import Interval
from meshplan.planner.validation.recorded import OUTLIER, RecordedRun, Recording, absurd, contradiction, outlier

STEP = Interval(value=2.0, low=1.6, high=2.5)


def run_off(ratio: float, width: float = math.log(1.25)) -> RecordedRun:
    recording = Recording(plan_id="abc", number=1, date="2026-11-23", figures={"iteration_s": 2.0 * ratio})
    return RecordedRun(
        recording=recording, key=("f", "g"), cluster="c", run=None, start=None, off={"iteration_s": (ratio, width)}
    )


@pytest.mark.parametrize("value", [1e9, 1e-9, 2.0e4, 2000.0 * 1.01])
def test_a_figure_in_another_unit_is_absurd(value: float) -> None:
    assert "another unit" in absurd(value, STEP)


@pytest.mark.parametrize("value", [2.0, 20.0, 0.02, 1999.0])
def test_a_figure_that_is_merely_far_off_is_not(value: float) -> None:
    assert absurd(value, STEP) == ""


@pytest.mark.parametrize("ratio", [10.0, 0.1, 2.0])
def test_an_outlier_is_told_with_the_way_to_keep_it(ratio: float) -> None:
    assert "--accept abc" in outlier(run_off(ratio))


@pytest.mark.parametrize("ratio", [1.0, 1.5, 0.7])
def test_what_an_interval_makes_likely_is_no_outlier(ratio: float) -> None:
    assert outlier(run_off(ratio)) == ""


def test_a_wide_interval_does_not_make_everything_likely() -> None:
    assert outlier(run_off(OUTLIER * 0.9, width=2.0)) == ""
    assert outlier(run_off(OUTLIER * 1.1, width=2.0))


def test_figures_of_one_step_agree() -> None:
    assert contradiction({}) == contradiction({"iteration_s": 2.0}) == ""
    assert contradiction({"iteration_s": 2.0, "tokens_per_s": 2.1}) == ""
    assert "another model" in contradiction({"iteration_s": 2.0, "tokens_per_s": 4.0})
