"""The cheapest whole fleet, by hand-made branch and bound; the simple way is the MILP of ``nodes/milp.py``.

Notation
    g, b      GPU type, bucket with traffic          c_g       USD/h of a replica
    n_g       replicas rented                        m_g       of these usable: n_g − spare where n_g > 0, else 0
    x_gb      share of bucket b sent to type g       load_gb   request_rate_b / max_request_rate_gb
    u_g       max_utilization · (1 − interruption_headroom_g)

Objective     min Σ_g c_g · n_g
Constraints   Σ_g x_gb = 1 for each b;  x_gb = 0 where max_request_rate_gb = 0
              Σ_b load_gb · x_gb ≤ u_g · m_g;  n_g ≤ max_count_g;  n whole, x ≥ 0

The shares are continuous and enter only through the load of each type, so they are projected out: what is searched is
the fleet m, in as many dimensions as there are types, against the polytope of loads that routings can produce
(``loads.py``). Its linear relaxation is solved by column generation (``relaxation.py``), whole counts by branch and
bound (``search.py``); the number of buckets costs one matrix pass per oracle call.

Bound         for all prices w ≥ 0 of a busy replica: Σ_g u_g · w_g · m_g ≥ Σ_b min_g w_g · load_gb. At w_g = c_g / u_g
              this is the closed bound Σ_b min_g c_g · load_gb / u_g; branching sharpens it until it meets the fleet.
              Wide problems leave a gap there; integer programs over the fleet and the inequalities met so far raise the
              bound further (``cuts.py``; SCIP, to its tolerance of 1e-6).
Status        ``optimal`` where bound and cost agree to 1e-9 (relative). Loads may exceed a capacity by 1e-7 of it,
              the precision of sums of shares.
"""

from __future__ import annotations

import importlib
import math
import time

import numpy as np

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Solution, Status, relative_gap, status_of
from meshplan.planner.gpu_allocation.replicas.answer import answer
from meshplan.planner.gpu_allocation.replicas.infeasible import impossible
from meshplan.planner.gpu_allocation.replicas.instance import Instance, instance_of
from meshplan.planner.gpu_allocation.replicas.problem import Allocation, GpuAllocationProblem
from meshplan.planner.gpu_allocation.replicas.relaxation import WHOLE, Balance, balance
from meshplan.planner.gpu_allocation.replicas.search import WorkBudget, cheapest_fleet

__all__ = ["answer", "solve"]

SOLVER = "branch and bound over fleets, column generation over loads (GLOP)"
# Estimated work after which an answer with a gap beats a later proof; a count, so that every run stops at the same box.
# Narrow problems (few entries of the load matrix) are nearly always proven long before.
DEFAULT_WORK_NARROW_S, DEFAULT_WORK_WIDE_S = 5.0, 1.3
# Relative distance of the final routing from the lowest peak; the fleet is settled by then.
_ROUTING_TOLERANCE = 1e-4


def solve(
    problem: GpuAllocationProblem,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    on_progress: OnProgress | None = None,
) -> Solution[Allocation]:
    """Find the cheapest fleet and a routing that fits it.

    Args:
        problem: the question.
        seed: recorded only; nothing here is random.
        budget: once it is spent the best fleet so far is returned with its gap; without a time limit the search stops
            after a fixed amount of work (1 to 2 s for 32 types and 1600 buckets), which gives the same answer on every
            run.
        on_progress: called when a better fleet is found.

    Raises:
        SolverError: the linear programs cannot be solved.
    """
    importlib.import_module("ortools.linear_solver.pywraplp")  # before the clocks start
    started, cpu_started = time.monotonic(), time.process_time()
    instance = instance_of(problem)
    budget = budget or Budget()
    left_s = budget.left_s()
    work_s = DEFAULT_WORK_NARROW_S if instance.narrow else DEFAULT_WORK_WIDE_S
    allowed = WorkBudget(
        work_s=work_s if left_s is None else math.inf,
        deadline_s=math.inf if left_s is None else time.monotonic() + left_s,
        question=budget,
    )
    fleet = None if impossible(instance) else cheapest_fleet(instance, allowed, on_progress)
    allocation = None
    cost = bound = gap = None
    status = Status.INFEASIBLE
    if fleet is not None and fleet.usable is not None:
        allocation = _allocation(problem, instance, fleet.usable, fleet.prices)
        prices = [gpu_type.usd_per_hour for gpu_type in problem.gpu_types]
        cost = math.fsum(n * price for n, price in zip(allocation.counts, prices, strict=True))
        bound = min(fleet.bound, cost)
        gap, status = relative_gap(cost, bound), status_of(cost, bound)
    return Solution(
        status=status,
        assignment=allocation,
        objective=cost,
        bound=bound,
        gap=gap,
        wall_s=time.monotonic() - started,
        cpu_s=time.process_time() - cpu_started,
        solver=SOLVER,
        seed=seed,
        stopped=budget.stopped,
    )


def _allocation(
    problem: GpuAllocationProblem, instance: Instance, usable: FloatArray, prices: FloatArray
) -> Allocation:
    """Route over the fleet so that the fullest type is as empty as possible."""
    routed = _route(instance, usable)
    busy = (routed.shares * np.where(instance.servable, instance.load, 0.0)).sum(axis=1)
    utilization = np.divide(busy, usable, out=np.zeros_like(busy), where=usable > 0)
    routing = np.zeros((len(problem.gpu_types), len(problem.buckets)))
    routing[:, instance.buckets] = routed.shares
    counts = usable + instance.spare * (usable > 0)
    return Allocation(
        counts=tuple(int(n) for n in counts),
        routing=tuple(tuple(row) for row in routing.tolist()),
        utilization=tuple(utilization.tolist()),
        prices_usd_per_hour=tuple(prices.tolist()),
    )


def _route(instance: Instance, usable: FloatArray) -> Balance:
    capacity = instance.utilization * usable
    routed = balance(instance.load, capacity, tolerance=_ROUTING_TOLERANCE)
    if routed is not None and routed.peak > 1.0:
        routed = balance(instance.load, capacity)
    if routed is None or routed.peak > 1.0 + 2 * WHOLE:
        peak = "nowhere to go" if routed is None else f"a load of {routed.peak:.9f} times the capacity"
        raise SolverError(
            f"the routing over the chosen fleet leaves {peak}, though the fleet was found to suffice: the numbers span "
            "too many orders of magnitude; please report this instance"
        )
    return routed
