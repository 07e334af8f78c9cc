"""Why no way runs, what came nearest, and how many more machines would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.planner.core.budget import Budget
from meshplan.planner.edge.options import Options, every_option
from meshplan.planner.edge.plan import label
from meshplan.planner.edge.problem import EdgeProblem
from meshplan.planner.edge.spec import MAX_MACHINES

# Machines of a kind that are tried beside those that are there.
MORE = (1, 2, 3, 4, 6, 8, 12, 16, 24)


def explain_infeasible(problem: EdgeProblem, options: Options, budget: Budget) -> dict[str, Any]:
    """Fields of the solver's report; see :mod:`meshplan.cli.reports.no_plan`.

    Args:
        problem: the question.
        options: all its ways.
        budget: once it is spent no further machines are tried.
    """
    if options.priced and problem.most_token_s is not None:
        best = options.priced[0]
        return {
            "binding_constraint": "time per token",
            "nearest_miss": {
                "limit": "time per token",
                "excess_text": f"{format_duration(best.time.total_s)} for {format_duration(problem.most_token_s)}",
                "label": f"{best.group.engine.name} on {label(problem, best.group)}",
            },
            "least_change": [{"change": f"constraints.time_per_token: {format_duration(best.time.total_s)}"}],
        }
    if options.nearest is None:
        reason = next((name for name, _ in options.rejected.most_common()), "no engine is left")
        return {"binding_constraint": reason, "tried": ("every engine that the constraints name",)}
    lacking, group = options.nearest
    return {
        "binding_constraint": "memory",
        "nearest_miss": {
            "limit": "memory",
            "excess_text": f"{format_bytes(lacking)} too much on a machine",
            "label": f"{group.engine.name} on {label(problem, group)}",
        },
        "least_change": _changes(problem, budget),
        "tried": (f"up to {MORE[-1]} more machines of each kind, a drive for each",),
    }


def _changes(problem: EdgeProblem, budget: Budget) -> list[dict[str, str]]:
    """The fewest more machines of a kind with which a way runs, of each kind; and a drive."""
    found = []
    for index, kind in enumerate(problem.kinds):
        for more in MORE if problem.network is not None else ():
            kinds = list(problem.kinds)
            kinds[index] = replace(kind, count=kind.count + more, addresses=())
            if sum(one.count for one in kinds) > MAX_MACHINES or budget.stopped:
                break
            options = every_option(replace(problem, kinds=tuple(kinds)), budget)
            if options.priced:
                best = options.priced[0]
                words = f"{best.group.engine.name} on {label(replace(problem, kinds=tuple(kinds)), best.group)}"
                rate = f"{1.0 / best.time.total_s:.3g} tokens/s"
                found.append({"change": f"{more} more {kind.name}", "label": f"{words}: {rate}"})
                break
    return found
