"""A deployment finishes requests as fast as they arrive, or is none: also where no SLO limits how long they wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_questions import load, spec

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.solution import Status
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.search import search_serving
from meshplan.planner.serving.search.slo_judgement import judge
from meshplan.planner.serving.search.trials import FEWEST, LONGER_RUN, LONGEST, Load, Trial, Verdict, tried
from meshplan.planner.serving.simulation.arrivals import make_requests, scaled
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.slo_attainment import pace

WORKLOAD = ServingWorkload(arrival=Arrival.POISSON, input_length=1, output_length=20, request_rate_per_s=1.0)
# 70B on one node: 2 requests/s, of which the cheapest deployments by the closed form finish 1.6 to 1.8.
ASKED = spec(
    workload={"input_length": 4000, "output_length": 1000, "request_rate_per_s": 2},
    slo={},
    objective="num_devices",
    fixed={"mode": "aggregated"},
)


def queue(requests: Requests, stopping: EarlyStopping | None = None, *, decode_s: float = 0.0) -> ServingRun:
    """One server, a second for each first token, first come first served (Lindley's recursion); what comes after it
    takes ``decode_s`` beside.
    """
    level = np.concatenate(([0.0], np.cumsum(1.0 - np.diff(requests.arrival_s))))
    first = requests.arrival_s + level - np.minimum.accumulate(level) + 1.0
    return ServingRun(
        arrival_s=requests.arrival_s,
        input_length=requests.input_length,
        output_length=requests.output_length,
        is_served=np.ones(len(requests), dtype=bool),
        admitted_s=first - 1.0,
        first_token_s=first,
        finish_s=first + decode_s,
        workers=(),
    )


def at(rate: float, seed: int, *slos: Slo, given: int | None = None, goes_on: bool = True) -> Trial:
    """The queue under a rate, of which it finishes one request a second."""

    def drawn(num: int) -> Requests:
        return scaled(make_requests(replace(WORKLOAD, num_requests=num), seed=seed), rate)

    asked = Load(requests=drawn, given=given, goes_on=goes_on, utilization=0.8 * rate)
    return tried(asked, queue, slos, may_stop_early=False)


@pytest.mark.parametrize("rate", [1.02, 1.05, 1.2, 3.0])
def test_a_queue_that_grows_is_no_answer_and_what_is_finished_is_said(rate: float) -> None:
    for seed in range(6):
        found = at(rate, seed)
        assert found.verdict is not Verdict.MET
        assert not found.keeps_pace
        if found.verdict is Verdict.VIOLATED:
            assert found.pace is not None
            assert found.pace.finished_per_s(rate) == pytest.approx(1.0, rel=0.05)
    assert {at(rate, seed).verdict for seed in range(6)} == {Verdict.VIOLATED}


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9, 0.95])
def test_a_queue_that_ends_is_shown_to_as_far_as_runs_may_go(rate: float) -> None:
    trials = [at(rate, seed) for seed in range(6)]
    assert {trial.verdict for trial in trials} == {Verdict.MET}
    assert all(trial.keeps_pace for trial in trials)
    if rate < 0.5:
        assert {trial.num_requests for trial in trials} == {FEWEST}


def test_a_load_at_the_capacity_is_not_called_kept() -> None:
    """A queue that is just about to grow: at most few runs say that it does, and few that it does not."""
    trials = [at(1.0, seed) for seed in range(8)]
    assert sum(trial.verdict is Verdict.MET for trial in trials) <= 4
    assert any(trial.num_requests == LONGEST for trial in trials)


def test_a_limit_that_waits_reach_later_hides_no_growing_queue() -> None:
    """Ten thousand seconds are more than any wait of a first run, and less than those of a day."""
    wide = Slo(metric="ttft", percentile="p99", limit_s=1e4)
    assert at(1.2, 0, wide).verdict is Verdict.VIOLATED
    assert at(0.9, 0, wide).verdict is Verdict.MET


def test_requests_that_end_are_held_against_what_they_waited_alone() -> None:
    """A number of requests is given: with a limit on waits that decides, without one the queue."""
    wide = Slo(metric="ttft", percentile="p99", limit_s=1e4)
    assert at(1.2, 0, wide, given=600).verdict is Verdict.MET
    assert at(1.2, 0, given=600).verdict is Verdict.VIOLATED
    assert at(0.9, 0, given=600).verdict is Verdict.MET
    assert at(1.2, 0, given=600, goes_on=False).verdict is Verdict.MET, "closed loops and traces have no rate to keep"


def test_batches_that_fill_are_no_growing_queue() -> None:
    """Stays of half an hour: until the first requests leave, all that a run shows is that more are there."""

    def slowly(requests: Requests, stopping: EarlyStopping | None) -> ServingRun:
        run = queue(requests, stopping, decode_s=1800.0)
        filling = 40.0 * np.minimum(run.arrival_s / 1800.0, 1.0)  # decodes that run beside delay first tokens
        return replace(run, first_token_s=run.first_token_s + filling, finish_s=run.finish_s + filling)

    def drawn(num: int) -> Requests:
        return scaled(make_requests(replace(WORKLOAD, num_requests=num)), 0.5)

    early = slowly(drawn(FEWEST), None).after(FEWEST // 10)
    told = pace(early)
    assert told is not None
    assert told.is_lost, "the first run does not need the rule"
    found = tried(Load(requests=drawn, goes_on=True), slowly, [], may_stop_early=False)
    assert found.verdict is Verdict.MET
    assert found.num_requests > FEWEST


def problem_of(catalog: Catalog, asked: dict[str, Any]) -> ServingProblem:
    return resolve_serving(read_serving_spec(asked), catalog, Path()).problem


def test_a_plan_without_limits_on_waits_keeps_pace_in_longer_runs_of_other_requests(catalog: Catalog) -> None:
    problem = problem_of(catalog, ASKED)
    solution, report = search_serving(problem)
    chosen = solution.assignment
    assert chosen is not None
    assert solution.status is Status.OPTIMAL
    other = judge(problem, chosen.candidate.config, num_requests=LONGER_RUN, seed=101)
    assert other.is_met
    lost = [one for one in report.simulated if not one.judged.is_met]
    assert lost, "the question does not need the test"
    assert min(one.candidate.score for one in lost) <= chosen.score
    assert all(one.score == float("inf") and one.judged.requests_per_s <= 2.0 for one in lost)
    for one in lost[:1]:
        again = judge(problem, one.candidate.config, num_requests=LONGER_RUN, seed=101)
        assert again.requests_per_s == pytest.approx(one.judged.requests_per_s, rel=0.05)


def test_the_table_says_what_the_others_finish(catalog: Catalog) -> None:
    made = make_plan({**ASKED, "fixed": {"mode": "aggregated", "pipeline_parallel": 3}}, catalog)
    short = [row for row in made.alternatives if "requests/s of the 2 offered" in str(row["reason"])]
    assert made.config
    assert short
    assert all(row["requests_per_s"] < 1.98 for row in short)


def test_no_plan_says_what_is_finished_and_what_would_do(catalog: Catalog) -> None:
    fixed = {"mode": "aggregated", "tensor_parallel": 1, "pipeline_parallel": 6}
    asked = {**ASKED, "fixed": fixed}
    made = make_plan(asked, catalog)
    assert not made.config
    assert made.solution["nearest_miss"]["limit"] == "request_rate_per_s"
    assert "of the 2 offered" in made.solution["binding_constraint"]
    changes = [change["change"] for change in made.solution["least_change"]]
    (rate,) = (float(change.split(": ")[1]) for change in changes if change.startswith("request_rate_per_s"))
    assert 0.5 < rate < 2.0
    assert make_plan({**asked, "workload": {**asked["workload"], "request_rate_per_s": rate}}, catalog).config
    (devices,) = (int(change.split()[0]) for change in changes if "devices instead of 8" in change)
    more = {"nodes": [{"type": "dgx-h100", "count": -(-devices // 8)}]}
    assert make_plan({**asked, "cluster": more}, catalog).config


def test_an_estimate_says_what_it_finishes(catalog: Catalog) -> None:
    pins = {"tensor_parallel": 2, "pipeline_parallel": 3, "num_workers": 1}
    made = estimate_plan({**ASKED, "fixed": pins}, catalog)
    assert made.solution["kept"] is False
    assert made.predicted["requests_per_s"].value < 1.9
    assert "of the 2 offered, so that its queue only grows" in made.solution["binding_constraint"]
    alone = estimate_plan({**ASKED, "fixed": pins, "workload": load(concurrency=64)}, catalog)
    assert alone.solution["kept"] is True
