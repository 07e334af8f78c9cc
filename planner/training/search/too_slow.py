"""Whether every step takes longer than a limit: what the bounds of steps prove, and those of other objectives do not.

Under throughput a template's bound is a step that none of its candidates can beat. Templates are visited best bound
first, so that once the least bound left exceeds the limit nothing left can keep it. The search goes on until the least
bound exceeds the limit by the nearest miss, too: what is named as nearest is then the nearest of all.

Assumes: the limit is on what the objective counts as the step, which a run with interruptions stretches unless the
limit is on the run itself.
"""

from __future__ import annotations

from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search.report import STEP_TIME, SearchReport


def longest_s(problem: TrainingProblem) -> float | None:
    """Longest step, as the objective counts it for throughput; None where no limit is one on that."""
    limits = problem.limits
    return limits.max_step_s if problem.run is None or limits.max_run_s is not None else None


def nothing_left_is_fast_enough(problem: TrainingProblem, report: SearchReport, least_s: float) -> bool:
    """Whether all that is left takes longer than a step may, and than the nearest miss.

    Args:
        problem: the question.
        report: misses so far; as yet nothing is within the limits.
        least_s: least bound of what is left.
    """
    most_s = longest_s(problem)
    if most_s is None or problem.objective is not TrainingObjective.THROUGHPUT:
        return False
    nearest = report.nearest_miss.get(STEP_TIME)
    return nearest is not None and least_s > most_s + nearest[0]
