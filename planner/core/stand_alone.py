"""Plans of stand-alone problems: an instance with its numbers in the spec, a solver with a bound, an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan, own_version, plan_identity
from meshplan.planner.core.solution import Solution, solution_document

ProblemT = TypeVar("ProblemT")


def answer_plan(
    question: Question,
    problem: ProblemT,
    solve: Callable[..., Solution[Any]],
    answer: Callable[[ProblemT, Any], Mapping[str, Any]],
) -> Plan:
    """Solve an instance and keep its answer; nothing is looked up in the catalog.

    Args:
        question: how it was asked.
        problem: the instance, read.
        solve: (problem, seed, budget, on_progress) → solution.
        answer: (problem, solution) → the answer as plain JSON, in the format of the kind's README.
    """
    solution = solve(problem, seed=question.seed, budget=question.budget, on_progress=question.on_progress)
    return Plan(
        **plan_identity(question.document, {}),
        config={},
        predicted={},
        solution=solution_document(solution, question.seed),
        answer=answer(problem, solution),
        provenance={"meshplan": own_version()},
    )
