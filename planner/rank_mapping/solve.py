"""Rank mapping: assign nodes to the cells of a pipeline × data-parallel job, on measured directed links.

Notation
    n = P·d nodes; cell (r, q) is pipeline r, stage q; u(a, b) = latency + M / bandwidth of the directed link a → b;
    C = 2(d − 1)/d · D.

Objective
    T = max_r Σ_q k·(u(a, b) + u(b, a)) over neighbours a = node(r, q), b = node(r, q + 1)
    + max_q C / (slowest directed link of stage q's ring).

Constraints
    nodes and cells are matched one to one; the d nodes of each stage form a ring in any order.

Method
    annealing on whole neighbourhoods (:mod:`.search`), exact best rings for d ≤ 8, a lower bound from the connectivity
    of the links (:mod:`.bound`), and for n ≤ 16 an exhaustive search that finds a better mapping or proves that none is
    (:mod:`.exact`). The search stops after a fixed amount of work; the time limit is a safeguard.

Source: the problem is Pipette's worker mapping (Yim et al., arXiv:2405.18093), with every stage's ring counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.planner.core.arrays import IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Progress, Solution, Status, relative_gap, status_of
from meshplan.planner.rank_mapping.bound import LowerBound, lower_bound
from meshplan.planner.rank_mapping.exact.search import improve_exactly
from meshplan.planner.rank_mapping.exact.tables import MAX_EXACT_NODES
from meshplan.planner.rank_mapping.objective import LinkCosts, best_ring, best_rings
from meshplan.planner.rank_mapping.problem import RankMappingProblem
from meshplan.planner.rank_mapping.search import (
    NUM_RANDOM_MAPPINGS,
    RANDOM_SEED,
    default_steps,
    identity_lines,
    search,
)

SOLVER = "annealing"
SOLVER_EXACT = "annealing + exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMapping:
    """A mapping.

    Args:
        assignment: d pipelines of P nodes each, by stage.
        rings: P stages of d nodes each, in ring order (each sends to the next, the last to the first).
    """

    assignment: tuple[tuple[int, ...], ...]
    rings: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, lines: IntArray, rings: IntArray) -> RankMapping:
        """Build from [P, d] nodes by (stage, pipeline) and [P, d] nodes by (stage, ring position)."""
        return cls(
            assignment=tuple(tuple(row) for row in lines.T.tolist()), rings=tuple(tuple(row) for row in rings.tolist())
        )

    @property
    def lines(self) -> IntArray:
        """[P, d] node of each (stage, pipeline)."""
        return np.array(self.assignment, dtype=np.int64).T

    @property
    def ring_orders(self) -> IntArray:
        """[P, d] nodes of each stage in ring order."""
        return np.array(self.rings, dtype=np.int64)


def solve(
    problem: RankMappingProblem,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    on_progress: OnProgress | None = None,
) -> Solution[RankMapping]:
    """The best mapping found, with a proven lower bound.

    Args:
        problem: the instance.
        seed: seed of the search. The same seed gives the same answer unless the time limit is reached.
        budget: once it is spent the search stops with what it has; None for the default work.
        on_progress: called with incumbent and bound during the search.
    """
    wall, cpu = time.monotonic(), time.process_time()
    budget = budget or Budget()
    report = _ProgressReporter(on_progress)
    costs = LinkCosts.of(problem)
    bound = lower_bound(costs)
    report(None, bound.total_s, "bound from the structure of the links")
    lines = identity_lines(costs)
    rings = best_rings(costs.ring_s, lines)
    objective, bound_s, solver = costs.objective_s(lines, rings), bound.total_s, "identity"
    if status_of(objective, bound_s) is not Status.OPTIMAL:
        lines, rings, objective = _searched(costs, lines, rings, bound, seed, budget, report)
        solver = SOLVER
    may_prove = costs.num_nodes <= MAX_EXACT_NODES and not budget.stopped
    if may_prove and status_of(objective, bound_s) is not Status.OPTIMAL:
        exact = improve_exactly(
            costs, bound_s=bound_s, pipeline_bound_s=bound.pipeline_s, incumbent_s=objective, budget=budget
        )
        bound_s, solver = exact.bound_s, SOLVER_EXACT
        if exact.lines is not None:
            lines = exact.lines
            rings = np.stack([best_ring(costs.ring_s, np.sort(stage)) for stage in lines])
            objective = costs.objective_s(lines, rings)
    # The two are sums of the same numbers in different orders: rounding may put the bound one ulp above.
    bound_s = min(bound_s, objective)
    report(objective, bound_s, "done")
    return Solution(
        status=status_of(objective, bound_s),
        assignment=RankMapping.of(lines, rings),
        objective=objective,
        bound=bound_s,
        gap=relative_gap(objective, bound_s),
        wall_s=time.monotonic() - wall,
        cpu_s=time.process_time() - cpu,
        solver=solver,
        seed=seed,
        stopped=budget.stopped,
    )


def _searched(
    costs: LinkCosts,
    lines: IntArray,
    rings: IntArray,
    bound: LowerBound,
    seed: int,
    budget: Budget,
    report: Callable[[float | None, float, str], None],
) -> tuple[IntArray, IntArray, float]:
    """Lines, rings and objective of the best of annealing and the given mapping, with exact rings where affordable."""
    found = search(
        costs,
        seed=seed,
        steps=default_steps(costs.num_nodes),
        ring_scale_s=bound.ring_s,
        budget=budget,
        on_improvement=lambda best: report(best, bound.total_s, "annealing"),
    )
    candidates = [(lines, rings), (found.lines, found.rings), (found.lines, best_rings(costs.ring_s, found.rings))]
    values = [costs.objective_s(*candidate) for candidate in candidates]
    best = int(np.argmin(values))
    return *candidates[best], values[best]


class _ProgressReporter:
    """Calls ``on_progress`` if there is one."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self.on_progress = on_progress

    def __call__(self, incumbent: float | None, bound: float, note: str) -> None:
        if self.on_progress is not None:
            self.on_progress(Progress(incumbent=incumbent, bound=bound, note=note))


def answer(problem: RankMappingProblem, solution: Solution[RankMapping]) -> dict[str, Any]:
    """The answer document: mapping, objective compared with default and random layouts, and the critical path."""
    mapping = solution.assignment
    if mapping is None or solution.objective is None or solution.bound is None:
        return {"status": solution.status.value}
    costs = LinkCosts.of(problem)
    return {
        "status": solution.status.value,
        "method": solution.solver,
        "objective_s": solution.objective,
        "identity_s": identity_s(costs),
        "random_mean_s": random_mean_s(costs),
        "bound_s": solution.bound,
        "gap": solution.gap,
        "assignment": [list(row) for row in mapping.assignment],
        "rings": [list(row) for row in mapping.rings],
        "critical_path": critical_path(problem, costs, mapping),
    }


def identity_s(costs: LinkCosts) -> float:
    """Objective of the default layout: node(r, q) = q·d + r, with best rings for d ≤ 8 and index order beyond."""
    lines = identity_lines(costs)
    return costs.objective_s(lines, best_rings(costs.ring_s, lines))


def random_mean_s(costs: LinkCosts) -> float:
    """Mean objective of random mappings, with rings in random order."""
    rng = np.random.default_rng(RANDOM_SEED)
    shape = (costs.num_stages, costs.num_pipelines)
    values = []
    for _ in range(NUM_RANDOM_MAPPINGS):
        lines = rng.permutation(costs.num_nodes).reshape(shape)
        values.append(costs.objective_s(lines, lines))
    return float(np.mean(values))


def critical_path(problem: RankMappingProblem, costs: LinkCosts, mapping: RankMapping) -> dict[str, Any]:
    """The slowest pipeline, the slowest ring, and their slowest links."""
    lines, rings = mapping.lines, mapping.ring_orders
    pipeline_s, ring_s = costs.pipeline_times_s(lines), costs.ring_times_s(rings)
    pipeline, stage = int(pipeline_s.argmax()), int(ring_s.argmax())
    nodes, order = lines[:, pipeline], rings[stage]
    path: dict[str, Any] = {
        "pipeline": pipeline,
        "pipeline_nodes": nodes.tolist(),
        "pipeline_s": float(pipeline_s[pipeline]),
        "stage": stage,
        "ring": order.tolist(),
        "data_parallel_s": float(ring_s[stage]),
    }
    if costs.num_stages > 1:
        hops = costs.hop_s[nodes[:-1], nodes[1:]]
        slowest = int(hops.argmax())
        path["slowest_hop"] = {
            "stages": [slowest, slowest + 1],
            "nodes": [int(nodes[slowest]), int(nodes[slowest + 1])],
            "time_s": float(hops[slowest]),
        }
    if costs.num_pipelines > 1:
        after = np.roll(order, -1)
        place = int(costs.ring_s[order, after].argmax())
        sender, receiver = int(order[place]), int(after[place])
        path["slowest_ring_link"] = {
            "sender": sender,
            "receiver": receiver,
            "bandwidth_bytes_per_s": float(problem.bandwidth_bytes_per_s[sender, receiver]),
        }
    return path
