"""What every solver returns: an assignment with a proof of how good it is; and what was tried where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, TypeVar

AssignmentT = TypeVar("AssignmentT")
Change = TypeVar("Change")

# Below this relative gap an incumbent counts as proven optimal: the rounding of double-precision sums, no more.
OPTIMAL_RELATIVE_GAP = 1e-9


class Status(Enum):
    """Outcome of a solve; ``optimal`` only where ``bound`` proves it."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution(Generic[AssignmentT]):
    """An answer and its proof.

    Args:
        status: see :class:`Status`.
        assignment: the decision in the problem's own type; None when infeasible.
        objective: value of the assignment in the problem's unit; None when infeasible.
        bound: no assignment can be better than this (lower bound when minimising, upper when maximising).
        gap: :func:`relative_gap` of objective and bound; None when infeasible.
        wall_s: elapsed seconds, imports excluded. No digest covers it.
        cpu_s: processor seconds, imports excluded. No digest covers it.
        solver: which method found the assignment.
        seed: what the pseudo-random choices started from.
        stopped: why the search ended before it was done (a limit, Ctrl-C); empty where it was done.
    """

    status: Status
    assignment: AssignmentT | None
    objective: float | None
    bound: float | None
    gap: float | None
    wall_s: float
    cpu_s: float
    solver: str
    seed: int = 0
    stopped: str = ""


def relative_gap(objective: float, bound: float) -> float:
    """|objective − bound| / |objective|; 0 when both are 0, and 1 when only the objective is.

    >>> relative_gap(100.0, 98.0)
    0.02
    """
    if objective == bound:
        return 0.0
    if objective == 0.0:
        return 1.0
    return abs(objective - bound) / abs(objective)


def status_of(objective: float, bound: float, *, tolerance: float = OPTIMAL_RELATIVE_GAP) -> Status:
    """``OPTIMAL`` when the bound proves it within ``tolerance``, else ``FEASIBLE``."""
    return Status.OPTIMAL if relative_gap(objective, bound) <= tolerance else Status.FEASIBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress report of a solver: incumbent and bound.

    Args:
        incumbent: best objective so far; None while there is none.
        bound: best bound so far; None while there is none.
        note: current activity, in short.
        unit: of incumbent and bound, as in :data:`meshplan.catalogs.units`; empty for a number without one.
    """

    incumbent: float | None
    bound: float | None
    note: str
    unit: str = ""


OnProgress = Callable[[Progress], None]


def bounded(found: Solution[AssignmentT], bound: float, earlier: Solution[AssignmentT]) -> Solution[AssignmentT]:
    """An answer under a bound that another search has proven, with the time of both.

    Args:
        found: an answer with an objective.
        bound: of the same question, no larger than the objective.
        earlier: the other search.
    """
    if found.objective is None:
        raise ValueError("no objective to bound")
    return replace(
        found,
        bound=bound,
        gap=relative_gap(found.objective, bound),
        status=status_of(found.objective, bound),
        wall_s=earlier.wall_s + found.wall_s,
        cpu_s=earlier.cpu_s + found.cpu_s,
    )


def solution_document(solution: Solution[Any], seed: int) -> dict[str, Any]:
    """The solver's report as plain JSON."""
    document = {
        "status": solution.status.value,
        "objective": solution.objective,
        "bound": solution.bound,
        "gap": solution.gap,
        "wall_s": solution.wall_s,
        "cpu_s": solution.cpu_s,
        "solver": solution.solver,
        "seed": seed,
    }
    return {**document, "stopped": solution.stopped} if solution.stopped else document


def tried(attempts: Iterable[tuple[str, Callable[[], Change | None]]]) -> tuple[list[Change], list[str]]:
    """The changes that help, and everything that was tried, in words.

    Args:
        attempts: in words → the change that helps; None where it does not.

    >>> tried([("more devices", lambda: None), ("a lower rate", lambda: "2 requests/s")])
    (['2 requests/s'], ['more devices', 'a lower rate'])
    """
    changes, words = [], []
    for said, attempt in attempts:
        words.append(said)
        change = attempt()
        if change is not None:
            changes.append(change)
    return changes, words
