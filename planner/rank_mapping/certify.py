"""A second opinion on a rank mapping: CP-SAT looks for a faster one, and the time is summed link by link.

Notation
    x_vc        node v is cell c = (pipeline r, stage q)
    a_quv       the ring of stage q goes from node u to node v
    t_r, g      time of pipeline r, of the slowest ring, in units of 10⁻⁸ of the stated bound, rounded down

Constraints   Σ_v x_vc = 1; Σ_c x_vc = 1; the arcs a_q form one circuit through the nodes of stage q
              t_r ≥ Σ_q hop(node(r, q), node(r, q + 1));  g ≥ ring(u, v) · a_quv;  max_r t_r + g < the stated bound

Each of the P terms of a time loses less than a unit by rounding: no solution below bound − P units proves that no
mapping is faster than that.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from meshplan.planner.core.certificate import Certificate, Check, none_better, same_value
from meshplan.planner.core.plan import Plan
from meshplan.planner.rank_mapping.problem import RankMappingProblem

UNITS = 100_000_000  # of the stated bound
# Nodes up to which CP-SAT is asked, and its deterministic seconds (one worker, so that runs agree).
MOST_NODES = 16
DETERMINISTIC_S = 30.0
SEED = 1


def certify_mapping(problem: RankMappingProblem, plan: Plan) -> Certificate:
    """Hold a mapping against CP-SAT and its own sums."""
    if not plan.answer:
        return Certificate(method="none", covers="a question without an answer", checks=())
    bound = float(plan.solution["bound"])
    own = same_value("slowest pipeline + slowest ring, s", plan.solution["objective"], _time_s(problem, plan.answer))
    if problem.num_nodes > MOST_NODES or bound <= 0.0:
        covers = f"the time of the mapping; its bound is looked at up to {MOST_NODES} nodes"
        return Certificate(method="sums over the links", covers=covers, checks=(own,))
    faster = _faster_s(problem, bound)
    what = "no mapping is faster than, s"
    if faster is None:
        return Certificate(
            method="CP-SAT instead of enumeration",
            covers="the time of the mapping; on its bound CP-SAT came to no end",
            checks=(own,),
        )
    check = Check(what=what, stated=bound, found="none", agrees=True)
    if math.isfinite(faster):
        check = none_better(what, bound, faster)
    return Certificate(method="CP-SAT instead of enumeration", covers="the whole question", checks=(own, check))


def _hop_s(problem: RankMappingProblem, a: int, b: int) -> float:
    """Round trips of all exposed micro-batches between two nodes."""
    message, bandwidth, latency = problem.pipeline_message_bytes, problem.bandwidth_bytes_per_s, problem.latency_s
    there = float(latency[a, b] + message / bandwidth[a, b])
    back = float(latency[b, a] + message / bandwidth[b, a])
    return problem.num_microbatches_exposed * (there + back)


def _ring_s(problem: RankMappingProblem, a: int, b: int) -> float:
    """A ring all-reduce whose slowest link is this one."""
    pipelines = problem.data_parallel_nodes
    volume = 2.0 * (pipelines - 1) / pipelines * problem.data_parallel_message_bytes
    return float(volume / problem.bandwidth_bytes_per_s[a, b])


def _time_s(problem: RankMappingProblem, answer: Any) -> float:
    """Time of a mapping, link by link."""
    pipelines = [math.fsum(_hop_s(problem, a, b) for a, b in itertools.pairwise(row)) for row in answer["assignment"]]
    rings = [
        _ring_s(problem, a, b)
        for ring in answer["rings"]
        for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)
        if a != b
    ]
    return max(pipelines) + max(rings, default=0.0)


def _faster_s(problem: RankMappingProblem, bound_s: float) -> float | None:
    """Time of a mapping faster than the bound; ∞ where there is none, None where CP-SAT did not come to an end."""
    from ortools.sat.python import cp_model  # start-up: about 1 s

    model = cp_model.CpModel()
    nodes, stages, pipelines = range(problem.num_nodes), problem.pipeline_parallel, problem.data_parallel_nodes
    cell = {(v, r, q): model.new_bool_var("") for v in nodes for r in range(pipelines) for q in range(stages)}
    for v in nodes:
        model.add_exactly_one(cell[v, r, q] for r in range(pipelines) for q in range(stages))
    for r in range(pipelines):
        for q in range(stages):
            model.add_exactly_one(cell[v, r, q] for v in nodes)
    slowest, ring = model.new_int_var(0, UNITS, ""), model.new_int_var(0, UNITS, "")
    model.add(slowest + ring <= UNITS - 1 - stages)
    _pipelines(model, problem, cell, slowest, UNITS / bound_s)
    if pipelines > 1:
        _rings(model, problem, cell, ring, UNITS / bound_s)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, SEED
    solver.parameters.max_deterministic_time = DETERMINISTIC_S
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return math.inf
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return (solver.value(slowest) + solver.value(ring)) * bound_s / UNITS


def _pipelines(model: Any, problem: RankMappingProblem, cell: Any, slowest: Any, per_s: float) -> None:
    """Every hop is an arc between the nodes of two cells, its time part of the pipeline's."""
    nodes, stages = range(problem.num_nodes), problem.pipeline_parallel
    for r in range(problem.data_parallel_nodes):
        hops = []
        for q in range(stages - 1):
            arcs = {(a, b): model.new_bool_var("") for a in nodes for b in nodes if a != b}
            for v in nodes:
                model.add(sum(arcs[v, b] for b in nodes if b != v) == cell[v, r, q])
                model.add(sum(arcs[a, v] for a in nodes if a != v) == cell[v, r, q + 1])
            hops += [math.floor(_hop_s(problem, a, b) * per_s) * arc for (a, b), arc in arcs.items()]
        if hops:
            model.add(sum(hops) <= slowest)
    for r in range(problem.data_parallel_nodes - 1):  # pipelines have no names
        first, second = (sum(v * cell[v, one, 0] for v in nodes) for one in (r, r + 1))
        model.add(first + 1 <= second)


def _rings(model: Any, problem: RankMappingProblem, cell: Any, ring: Any, per_s: float) -> None:
    """One circuit through the nodes of each stage; the others loop to themselves."""
    nodes = range(problem.num_nodes)
    for q in range(problem.pipeline_parallel):
        arcs = []
        for v in nodes:
            here = sum(cell[v, r, q] for r in range(problem.data_parallel_nodes))
            away = model.new_bool_var("")
            model.add(here + away == 1)
            arcs.append((v, v, away))
            for u in nodes:
                if u != v:
                    arc = model.new_bool_var("")
                    arcs.append((v, u, arc))
                    model.add(ring >= math.floor(_ring_s(problem, v, u) * per_s)).only_enforce_if(arc)
        model.add_circuit(arcs)
