"""Closed loops far beyond capacity: refused by bounds on waits, which no simulation goes below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_questions import small

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.service import make_plan
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search import overload as module
from meshplan.planner.serving.search.candidates import Candidate, candidate_of
from meshplan.planner.serving.search.overload import overload
from meshplan.planner.serving.search.search import families
from meshplan.planner.serving.search.slo_judgement import judge
from meshplan.planner.serving.search.workers import priced_workers

HOPELESS = {"input_length": 500, "output_length": 300, "concurrency": 4000}
SLOS = [{"ttft_p99_s": 1.0}, {"ttft_p90_s": 1.0, "tpot_p95_s": 0.1}]
TWO = {"constraints": {"max_devices": 2}}


def problem_of(catalog: Catalog, workload: dict[str, Any], slo: dict[str, float], **more: Any) -> ServingProblem:
    document = small("l40s", model="llama-3.1-8b", workload=workload, slo=slo, **more)
    return resolve_serving(read_serving_spec(document), catalog, Path()).problem


def deployments(problem: ServingProblem) -> Iterator[Candidate]:
    roles = (Role.MIXED, Role.PREFILL, Role.DECODE)
    for family in families(problem, *(priced_workers(problem, role, Counter()) for role in roles)):
        for counts in family.first():
            candidate = candidate_of(family, counts)
            if not problem.rules.broken(problem.shape, candidate.config):
                yield candidate


@pytest.mark.parametrize("slo", SLOS, ids=str)
def test_a_loop_far_beyond_capacity_is_refused_without_a_simulation(catalog: Catalog, slo: dict[str, float]) -> None:
    made = make_plan(small("l40s", model="llama-3.1-8b", workload=HOPELESS, slo=slo, **TWO), catalog)
    solution = made.solution
    assert (solution["status"], solution["num_simulated"]) == ("infeasible", 0)
    assert solution["binding_constraint"].startswith("concurrency: with 4,000 requests in flight")
    (change,) = [one["change"] for one in solution["least_change"] if one["change"].startswith("concurrency")]
    fewer = {**HOPELESS, "concurrency": int(change.split(": ")[1])}
    assert make_plan(small("l40s", model="llama-3.1-8b", workload=fewer, slo=slo, **TWO), catalog).config
    assert not any("best found" in row["reason"] for row in made.rejected), "nothing was found"


@pytest.mark.parametrize(
    "workload",
    [
        {"input_length": 500, "output_length": 40, "concurrency": 300},
        {"input_length": 2000, "output_length": 10, "concurrency": 200, "length_ratio": 0.5},
        {"input_length": 4000, "output_length": 100, "concurrency": 300, "num_requests": 1200},
    ],
    ids=str,
)
def test_no_simulation_waits_less_than_the_bound(
    catalog: Catalog, workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what is allowed is so near to a bound that nothing is refused: any limit is held against it here."""
    monkeypatch.setattr(module, "DECISIVE", 1e-3)
    slo = {f"{metric}_{part}_s": 5.0 for metric in ("ttft", "e2e") for part in ("mean", "p50", "p99")}
    held = 0
    for key, limit in slo.items():
        problem = problem_of(catalog, workload, {key: limit})
        for candidate in list(deployments(problem))[::7]:
            late = overload(candidate)
            if late is not None:
                (asked,) = problem.slos
                seen = judge(problem, candidate.config, costs=candidate.costs).metrics.value(asked)
                assert seen >= late.least_s, (key, candidate.config)
                held += 1
    assert held
