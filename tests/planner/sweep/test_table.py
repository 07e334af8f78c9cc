"""Rows of a study: the varied fields, the answers, the best of each group, and the front against brute force."""

from __future__ import annotations

import random
from typing import Any

import pytest

from meshplan.catalogs.database.studies.points import Point, PointState
from meshplan.planner.sweep.metrics import METRICS
from meshplan.planner.sweep.table import OF_ENERGY, OF_KIND, OF_OBJECTIVE, PARETO, study_rows, unknown_metrics

STUDY: dict[str, Any] = {
    "kind": "serving",
    "objective": "usd_per_million_tokens",
    "best": None,
    "group_by": [],
    "pareto": ["output_tokens_per_s", "tpot_mean_s"],
}


def done(digest: str, *, status: str = "optimal", kept: bool | None = None, **predicted: float) -> Point:
    answer = {"status": status, "predicted": predicted, **({} if kept is None else {"kept": kept})}
    common: dict[str, Any] = {"owner": "me", "attempts": 1, "deaths": 0, "problem": None, "plan_id": f"plan-{digest}"}
    return Point(digest=digest, state=PointState.DONE, answer=answer, **common)


def rows_of(points: list[Point], values: list[dict[str, Any]] | None = None, **study: Any) -> list[dict[str, Any]]:
    values = values or [{"model": one.digest} for one in points]
    asked = [{"digest": one.digest, "values": of} for one, of in zip(points, values, strict=True)]
    return study_rows({**STUDY, "points": asked, **study}, {one.digest: one for one in points})


def test_the_front_is_that_of_comparing_all_with_all() -> None:
    rng = random.Random(1)
    for _ in range(50):
        points = [done(str(n), output_tokens_per_s=rng.randint(1, 6), tpot_mean_s=rng.randint(1, 6)) for n in range(12)]
        pairs = [
            (-one.answer["predicted"]["output_tokens_per_s"], one.answer["predicted"]["tpot_mean_s"])
            for one in points
            if one.answer
        ]
        expected = [not any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in pairs) for mine in pairs]
        assert [row["pareto"] for row in rows_of(points)] == expected


def test_the_best_is_one_of_each_group_and_keeps_its_slo() -> None:
    points = [
        done("a", usd_per_million_tokens=3.0),
        done("b", usd_per_million_tokens=1.0, status="feasible", kept=False),
        done("c", usd_per_million_tokens=2.0, status="feasible", kept=True),
        done("d", usd_per_million_tokens=5.0),
        done("e", status="infeasible"),
    ]
    rates = [{"workload.request_rate_per_s": rate} for rate in (1, 1, 1, 2, 2)]
    assert [row["point"] for row in rows_of(points, rates) if row["best"]] == [3]
    grouped = rows_of(points, rates, group_by=["workload.request_rate_per_s"])
    assert [row["point"] for row in grouped if row["best"]] == [3, 4]
    named = rows_of(points, rates, best="tpot_mean_s")
    assert [row["point"] for row in named if row["best"]] == []
    assert unknown_metrics({**STUDY, "best": "tpot_mean_s", "pareto": None}, named) == ["tpot_mean_s"]


def test_points_that_are_equally_good_are_all_best() -> None:
    points = [done(name, usd_per_million_tokens=usd) for name, usd in (("a", 2.0), ("b", 1.0), ("c", 1.0))]
    assert [row["point"] for row in rows_of(points) if row["best"]] == [2, 3]


@pytest.mark.parametrize(
    ("kind", "objective", "metric"),
    [("gpu-allocation", "cost", "usd_per_hour"), ("edge", None, "time_per_token_s")],
)
def test_fleets_and_machines_at_home_have_a_best_point(kind: str, objective: str | None, metric: str) -> None:
    """Their studies marked none, and did not show what decides."""
    points = [done(str(value), **{metric: value}) for value in (3.0, 1.0, 2.0)]
    rows = rows_of(points, kind=kind, objective=objective, pareto=None)
    assert [row["point"] for row in rows if row["best"]] == [2]


def test_more_of_a_run_that_trains_is_better() -> None:
    ratios = (0.9, 0.8)
    points = [done(str(ratio), effective_training_time_ratio=ratio) for ratio in ratios]
    rows = rows_of(points, best="effective_training_time_ratio")
    assert [row["point"] for row in rows if row["best"]] == [1]


def test_less_energy_of_a_step_is_better() -> None:
    points = [done(str(joules), energy_j_per_step=joules, tokens_per_s=1.0) for joules in (3e4, 1e4, 2e4)]
    rows = rows_of(points, kind="training", objective="energy", pareto=["tokens_per_s", "energy_j_per_step"])
    assert [row["point"] for row in rows if row["best"]] == [2]
    assert [row["point"] for row in rows if row["pareto"]] == [2]


def test_a_point_without_an_answer_says_how_far_it_is() -> None:
    common: dict[str, Any] = {"owner": None, "attempts": 1, "deaths": 0, "answer": None, "plan_id": None}
    problem = {"title": "it takes too long", "detail": "no answer within 5 s"}
    failed = Point(digest="a", state=PointState.FAILED, problem=problem, **common)
    rows = study_rows({**STUDY, "points": [{"digest": one, "values": {}} for one in "ab"]}, {"a": failed})
    assert [(row["status"], row["problem"]) for row in rows] == [
        ("failed", "it takes too long: no answer within 5 s"),
        ("waiting", None),
    ]


def test_a_varied_field_hides_no_answer() -> None:
    row = rows_of([done("a")], [{"status": 7, "model": "m"}])[0]
    assert (row["spec.status"], row["status"], row["model"]) == (7, "optimal", "m")


def test_every_metric_that_plans_compare_by_is_one_of_their_kind() -> None:
    known = {name for names in METRICS.values() for name in names} | {"num_devices"}
    assert {*OF_OBJECTIVE.values(), *OF_ENERGY.values()} <= known
    assert all(metric in METRICS[kind] for kind, metric in OF_KIND.items())
    for kind, front in PARETO.items():
        assert {OF_ENERGY[kind], *front} - {"num_devices"} <= set(METRICS[kind])
