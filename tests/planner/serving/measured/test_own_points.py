"""Own points of a curve: which are drawn, what is predicted with them, that no run is judged by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted_serving import prepared

from meshplan.catalogs.constants.serving import ServingCalibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.calibrate import refine_serving
from meshplan.planner.serving.measured.own_points import PointsResult, curves_of, predict_from_points
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.resolve import ANY, ANY_ENGINE
from meshplan.planner.validation.machines import MachineReader
from meshplan.planner.validation.summary import MetricSummary

SHIPPED = ServingCalibration(engine=ANY_ENGINE, architecture=ANY, source="defaults")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[PreparedRun]:
    reader = MachineReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))
    return prepared(reader, (16, 1, 4), "a") + prepared(reader, (2, 8), "b") + prepared(reader, (8,), "alone")


def predicted(runs: list[PreparedRun], **options: int) -> PointsResult:
    return predict_from_points(runs, lambda *_: SHIPPED, **options)


def by_metric(summary: tuple[MetricSummary, ...]) -> dict[str, MetricSummary]:
    return {item.metric: item for item in summary if item.group == "all"}


def test_a_curve_is_one_server_under_several_loads(runs: list[PreparedRun]) -> None:
    found = [[run.run.workload.concurrency for run in curve] for curve in curves_of(runs)]
    assert sorted(found) == [[1, 4, 16], [2, 8], [8]]


def test_points_are_given_and_help_the_others(runs: list[PreparedRun]) -> None:
    result = predicted(runs, num_points=1)
    status = [row.status for row in result.validation.rows]
    assert (status.count("given"), status.count("ok"), result.num_curves) == (2, 3, 2)
    assert all(item.n == 3 for item in result.validation.summary if item.group == "all")
    assert result.started_from == ("any-engine on any (0 runs, no date: defaults)",)
    before, after = by_metric(result.without), by_metric(result.validation.summary)
    for metric in ("ttft_s", "tpot_s"):
        assert after[metric].mape < before[metric].mape


def test_predictions_are_those_of_the_refined_set(runs: list[PreparedRun]) -> None:
    """What ``calibrate`` would store for the drawn points says the same of the others, to the last bit."""
    result = predicted(runs, num_points=1)
    ids = {run.run.id: run for run in runs}
    for group in "ab":
        rows = [row for row in result.validation.rows if row.group == group]
        given = [ids[row.id] for row in rows if row.status == "given"]
        (stored,) = refine_serving(given, lambda *_: SHIPPED, source="mine").calibrations
        for row in rows:
            values = ids[row.id].predicted(stored.for_load(ids[row.id].own_load).constants)
            assert {name: item.value for name, item in row.predicted.items()} == values


def test_draws_follow_the_seed_not_the_company(runs: list[PreparedRun]) -> None:
    def given(members: list[PreparedRun], seed: int) -> set[str]:
        rows = predicted(members, seed=seed).validation.rows
        return {row.id for row in rows if row.status == "given"}

    every = [given(runs, seed) for seed in range(6)]
    assert given(runs[::-1], 0) == every[0]
    assert given([run for run in runs if run.run.group == "a"], 0) == {name for name in every[0] if name[0] == "a"}
    assert len({frozenset(names) for names in every}) > 1


def test_two_processes_say_what_one_does(runs: list[PreparedRun]) -> None:
    assert predicted(runs, num_processes=2) == predicted(runs, num_processes=1)


def test_a_sample_is_of_whole_curves(runs: list[PreparedRun]) -> None:
    result = predicted(runs, sample=1)
    assert result.num_curves == 1
    assert len({row.group for row in result.validation.rows}) == 1


def test_curves_that_are_too_short_are_left_out(runs: list[PreparedRun]) -> None:
    assert predicted(runs, num_points=2).num_curves == 1
    nothing = predicted(runs, num_points=3)
    assert (nothing.num_curves, nothing.validation.rows, nothing.validation.coverage) == (0, (), 0.0)


def test_runs_without_a_metric_are_no_curve(runs: list[PreparedRun]) -> None:
    mute = [PreparedRun(replace(run.run, measured={})) for run in runs]
    assert curves_of(mute) == []
