"""The second opinion on training plans: agrees with true statements, and contradicts false ones."""

from __future__ import annotations

from typing import Any

import pytest
from core_cases import DENSE, MOE, problem_of

from meshplan.planner.core.budget import Budget
from meshplan.planner.core.certificate import AGREES, DISAGREES, Certificate
from meshplan.planner.training import certify
from meshplan.planner.training.certify import certify_plan
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees
from meshplan.planner.training.search.report import ScoredConfig

SMALL: dict[str, Any] = {"num_devices": 2, "global_batch_size": 2, "sequence_length": 512, "rules": MEGATRON}


def opinion(problem: TrainingProblem, scored: ScoredConfig | None, *, factor: float = 1.0) -> Certificate:
    """On the plan with its bound times a factor."""
    stated = {"iteration_s": None, "bound": None}
    if scored is not None:
        stated = {"iteration_s": scored.step_s, "bound": factor * scored.objective}
    return certify_plan(problem, None if scored is None else scored.config, stated, seed=0, budget=Budget())


@pytest.mark.parametrize("objective", [TrainingObjective.THROUGHPUT, TrainingObjective.ENERGY])
@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "experts"])
def test_a_small_question_is_enumerated_and_agrees(shape: Any, objective: TrainingObjective) -> None:
    problem = problem_of(shape, **SMALL, objective=objective)
    solution, _ = search_degrees(problem)
    certificate = opinion(problem, solution.assignment)
    assert certificate.outcome == AGREES
    assert certificate.covers.startswith("all ")
    assert len(certificate.checks) == 3
    assert certificate.checks[-1].found == pytest.approx(solution.objective, rel=1e-9)


def test_a_bound_that_is_too_good_is_contradicted() -> None:
    problem = problem_of(DENSE, **SMALL)
    solution, _ = search_degrees(problem)
    assert opinion(problem, solution.assignment, factor=1.01).outcome == DISAGREES


def test_a_worse_plan_is_contradicted() -> None:
    problem = problem_of(DENSE, **SMALL)
    _, search = search_degrees(problem)
    certificate = opinion(problem, search.best[-1])
    assert [check.agrees for check in certificate.checks] == [True, True, False]


def test_a_large_question_is_sampled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "MOST_PRICED", 60)
    problem = problem_of(DENSE, num_devices=16, global_batch_size=16, rules=MEGATRON)
    solution, _ = search_degrees(problem)
    certificate = opinion(problem, solution.assignment)
    assert certificate.outcome == AGREES
    assert certificate.covers == (
        "30 legal configurations one or two choices away from the plan, and a sample of 30 legal configurations"
    )
    # The best that recomputes everything, called the best of all: most neighbours, which recompute less, are faster.
    slow, _ = search_degrees(problem.with_fixed({"activation_recompute": "full"}))
    assert opinion(problem, slow.assignment).outcome == DISAGREES


def test_nothing_fits_is_held_against_what_does() -> None:
    tight = problem_of(DENSE, **SMALL, limits={"memory_bytes": 5e9})
    assert search_degrees(tight)[0].assignment is None
    assert opinion(tight, None).outcome == AGREES
    assert opinion(problem_of(DENSE, **SMALL), None).outcome == DISAGREES
