"""A second opinion on an allocation: the plain mixed-integer program, solved by CBC.

The program has a column for every (type, bucket) and none of the search's projections, columns or cuts. The fleet's
own numbers are recomputed from the decision in plain sums.
"""

from __future__ import annotations

import math
from typing import Any

from meshplan.planner.core.certificate import Certificate, Check, none_better, same_value
from meshplan.planner.core.plan import Plan
from meshplan.planner.gpu_allocation.nodes.milp import prove
from meshplan.planner.gpu_allocation.replicas.problem import GpuAllocationProblem

BACKEND = "cbc"
# Columns of the plain program beyond which CBC seldom comes to an end within a minute.
MOST_COLUMNS = 2_000
# What a share or a capacity may be missed by: the precision of sums of shares.
FITS = 1e-6


def certify_allocation(problem: GpuAllocationProblem, plan: Plan) -> Certificate:
    """Hold an allocation against CBC and its own sums."""
    columns = sum(rate > 0 for rate in problem.request_rate_per_s) * len(problem.gpu_types)
    own = _own_numbers(problem, plan.answer) if plan.answer and "counts" in plan.answer else ()
    if columns > MOST_COLUMNS:
        covers = f"the fleet's cost and loads; {columns} columns are too many for CBC (most {MOST_COLUMNS})"
        return Certificate(method="sums over the decision", covers=covers, checks=own)
    proven = prove(problem, BACKEND)
    if proven.cost is None or not own:
        stated, found = plan.solution["status"], "infeasible" if proven.cost is None else "a fleet"
        agrees = proven.cost is None and not own
        checks = (*own, Check(what="whether a fleet carries the load", stated=stated, found=found, agrees=agrees))
    else:
        checks = (*own, none_better("no fleet is cheaper than, USD/h", plan.solution["bound"], proven.cost))
        if plan.solution["status"] == "optimal":
            checks = (*checks, same_value("least cost, USD/h", plan.solution["objective"], proven.cost))
    return Certificate(
        method="plain mixed-integer program by CBC, instead of branch and bound over fleets",
        covers="the whole question",
        checks=checks,
    )


def _own_numbers(problem: GpuAllocationProblem, answer: Any) -> tuple[Check, ...]:
    """Cost, shares and loads, from the counts and the routing alone."""
    counts, routing = answer["counts"], answer["routing"]
    cost = math.fsum(counts[kind.name] * kind.usd_per_hour for kind in problem.gpu_types)
    unserved = max(
        (
            abs(1.0 - math.fsum(routing[kind.name][b] for kind in problem.gpu_types))
            for b, rate in enumerate(problem.request_rate_per_s)
            if rate > 0
        ),
        default=0.0,
    )
    fullest = 0.0
    for kind, capacity in zip(problem.gpu_types, problem.max_request_rate_per_s, strict=True):
        busy = 0.0
        for share, rate, most in zip(routing[kind.name], problem.request_rate_per_s, capacity, strict=True):
            if share > 0 and rate > 0:
                busy += share * rate / most if most > 0 else math.inf
        usable = max(0, counts[kind.name] - problem.min_spare_replicas)
        room = problem.max_utilization * (1.0 - kind.interruption_headroom) * usable
        if busy > 0:
            fullest = max(fullest, busy / room if room > 0 else math.inf)
    return (
        same_value("cost, USD/h", answer["cost_usd_per_hour"], cost),
        Check(what="largest part of a bucket sent nowhere", stated=0.0, found=unserved, agrees=unserved <= FITS),
        Check(what="load of the fullest type, of its room", stated=1.0, found=fullest, agrees=fullest <= 1.0 + FITS),
    )
