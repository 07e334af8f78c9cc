"""The degree search against every legal plan of small questions (:mod:`degree_brute_force`)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from core_cases import DENSE, MOE, machine_with, problem_of
from degree_brute_force import Costed, brute_force, price_all

from meshplan.planner.cluster.mesh import Mesh
from meshplan.planner.core.solution import Status
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingObjective
from meshplan.planner.training.search.degrees import search_degrees
from meshplan.planner.training.search.report import TIE_WIDTH

# A quad of V100 with slow links: a pair is slower than all four, so that smaller groups are not the faster ones.
QUAD = Mesh(links=((0, 1, 1, 2), (1, 0, 2, 1), (1, 2, 0, 2), (2, 1, 2, 0)), device_links=6)
ON_A_MESH = machine_with(4, mesh=QUAD, domain_size=4, scale_up_bytes_per_s=30e9)
QUESTIONS: dict[str, dict[str, Any]] = {
    "dense": {"shape": DENSE, "num_devices": 4, "global_batch_size": 4},
    "Megatron": {"shape": DENSE, "num_devices": 6, "global_batch_size": 6, "rules": MEGATRON},
    "experts": {"shape": MOE, "num_devices": 4, "global_batch_size": 4, "rules": MEGATRON},
    "no switch": {
        "shape": replace(DENSE, num_hidden_layers=4),
        "num_devices": 4,
        "global_batch_size": 4,
        "machine": ON_A_MESH,
    },
    "pinned": {"shape": DENSE, "num_devices": 4, "global_batch_size": 8, "fixed": {"pipeline_parallel": 2}},
}
# question → limits that rule out its fastest plan
LIMITS: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in QUESTIONS),
    ("dense", {"memory_bytes": 7.6e9}),
    ("Megatron", {"memory_bytes": 7.0e9}),
    ("experts", {"memory_bytes": 7.7e9}),
    ("dense", {"max_usd_per_hour": 7.5}),
    ("pinned", {"memory_bytes": 7.8e9}),
]
# Prices depend on the question alone: they are taken once for all limits and objectives, by one worker of the suite.
ALL = [
    pytest.param(name, limits, marks=pytest.mark.xdist_group(f"oracle {name}"), id=f"{name} {limits}")
    for name, limits in LIMITS
]


@cache
def everything(name: str) -> list[Costed]:
    return price_all(problem_of(**QUESTIONS[name]))


@pytest.mark.parametrize(("name", "limits"), ALL)
def test_nothing_beats_the_bound(name: str, limits: dict[str, float]) -> None:
    for objective in TrainingObjective:
        problem = problem_of(**QUESTIONS[name], limits=limits, objective=objective)
        best = brute_force(problem, everything(name))[0]
        solution, _ = search_degrees(problem)
        assert solution.objective is not None
        assert solution.bound is not None
        assert solution.gap is not None
        assert solution.objective >= best[0] * (1.0 - 1e-9), "the search found what brute force does not know"
        assert solution.bound <= best[0] * (1.0 + 1e-9), (objective, best)
        assert solution.gap <= TIE_WIDTH, (objective, best)
        assert solution.status is Status.OPTIMAL
        if not limits:  # other splits of the layers are looked for where they are worth it
            assert solution.objective == pytest.approx(best[0], rel=1e-9)


@pytest.mark.parametrize(("name", "limits"), [case for case in ALL if case.values[1]])
def test_the_limits_bind(name: str, limits: dict[str, float]) -> None:
    """A limit that leaves the optimum alone tests nothing."""
    free, bound = problem_of(**QUESTIONS[name]), problem_of(**QUESTIONS[name], limits=limits)
    assert brute_force(free, everything(name))[0][0] < brute_force(bound, everything(name))[0][0]
