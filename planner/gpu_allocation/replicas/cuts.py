"""Benders decomposition for wide problems: integer programs over the fleet alone, with a cut for every failed routing.

Every price vector w gives a cut Σ_g u_g · w_g · m_g ≥ L(w) on the usable replicas m of any feasible fleet. The cheapest
whole fleet within all cuts known so far is

    min Σ_g c_g · (m_g + spare · y_g)   with   a_k · m ≥ 1 for every cut k,   m_g ≤ most_g · y_g,   m whole

in as many columns as there are types, however many buckets there are. Its optimum bounds every fleet from below. If it
can be routed it is the cheapest of all; if not, the best balance over it gives a cut that it violates, and the program
is solved again (Benders, Numerische Mathematik 4, 1962). Infeasible fleets found on the way are repaired: replicas are
added, and exchanged, until they carry the load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.milp import LEAN, Program, solve_program
from meshplan.planner.gpu_allocation.replicas.exchange import CutPool, improve
from meshplan.planner.gpu_allocation.replicas.instance import Instance
from meshplan.planner.gpu_allocation.replicas.relaxation import WHOLE, balance

# Estimated seconds of one integer program: of reading it, and of an iteration of its simplex method.
_PROGRAM_S, _ITERATION_S = 0.1, 1e-4
# Boxes after which SCIP's bound is taken as it is.
_MAX_NODES = 500
# Most replicas added to a fleet that does not carry the load.
_MOST_ADDED = 3
# Relative distance at which bound and fleet count as met: SCIP's tolerance.
_MET = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharpened:
    """The fleet and bound after the integer programs.

    Args:
        usable: [types] the best fleet.
        cost: rent of the fleet, USD/h.
        bound: USD/h.
        work_s: estimated processor seconds.
    """

    usable: FloatArray
    cost: float
    bound: float
    work_s: float


def sharpen(
    instance: Instance, usable: FloatArray, cost: float, bound: float, cuts: CutPool, *, work_s: float, budget: Budget
) -> Sharpened:
    """Raise the bound and lower the cost of a fleet that works.

    Args:
        instance: the arrays of the problem.
        usable: [types] replicas of the fleet.
        cost: rent of the fleet, USD/h.
        bound: known so far, USD/h.
        cuts: inequalities known so far; grows.
        work_s: estimated processor seconds that may be spent.
        budget: of the whole answer; no program is begun once it is spent.
    """
    spent = program_s = 0.0
    while spent + program_s < work_s and not budget.stopped and cost - bound > _MET * cost:
        solved, iterations = _cheapest(instance, cuts.matrix())
        program_s = _PROGRAM_S + _ITERATION_S * iterations
        spent += program_s
        if solved is None:
            break
        candidate, least = solved
        bound = max(bound, min(least, cost))
        if bound >= cost * (1.0 - _MET):
            bound = cost
            break
        found, worked = _repaired(instance, candidate, cost, cuts)
        spent += worked
        if found is None:  # what is as cheap next to it fails too, each with its own cut, or is the next fleet
            found, worked = improve(instance, candidate, cost_of(instance, candidate), cost * (1.0 - _MET), cuts)
            spent += worked
        if found is None:
            continue
        usable, cost = found, cost_of(instance, found)
        if (
            found == candidate
        ).all():  # the cheapest that meets the cuts works: SCIP's own bound proves it, if it met it
            continue
        better, worked = improve(instance, usable, cost, cost * (1.0 - _MET), cuts)
        spent += worked
        if better is not None:
            usable, cost = better, cost_of(instance, better)
    return Sharpened(usable=usable, cost=cost, bound=min(bound, cost), work_s=spent)


def cost_of(instance: Instance, usable: FloatArray) -> float:
    """Rent of a fleet with its spares, USD/h."""
    return float(instance.price @ (usable + instance.spare * (usable > 0)))


def cut_program(instance: Instance, cuts: FloatArray) -> Program:
    """The cheapest whole fleet within the cuts: the program of the module's text; column g is m_g.

    Args:
        instance: the problem.
        cuts: [cuts, types] a of the inequalities a · m ≥ 1.
    """
    program = Program()
    rent = list(enumerate(zip(instance.most.tolist(), instance.price.tolist(), strict=True)))
    columns = [program.column(f"usable {g}", 0.0, most, cost=price, whole=True) for g, (most, price) in rent]
    for k, cut in enumerate(cuts):
        coefficients = {column: float(value) for column, value in zip(columns, cut, strict=True) if value > 0.0}
        program.row(f"cut {k}", coefficients, low=1.0)
    if instance.spare:
        for g, (most, price) in rent:
            used = program.column(f"use {g}", 0.0, 1.0, cost=price * instance.spare, whole=True)
            program.row(f"spare {g}", {used: most, columns[g]: -1.0}, low=0.0)
    return program


def _cheapest(instance: Instance, cuts: FloatArray) -> tuple[tuple[FloatArray, float] | None, int]:
    """The cheapest whole fleet within the cuts and the bound on it, and the iterations that it took."""
    solved = solve_program(cut_program(instance, cuts), max_nodes=_MAX_NODES, parameters=LEAN)
    if not solved.values:
        return None, solved.num_iterations
    fleet = np.round(np.array(solved.values[: len(instance.price)]))
    return (fleet, solved.bound), solved.num_iterations


def _repaired(instance: Instance, fleet: FloatArray, cost: float, cuts: CutPool) -> tuple[FloatArray | None, float]:
    """The fleet, or one with a few replicas more, that carries the load for less than ``cost``; None where none does.

    What is added is what the broken cut gains most from for its price.
    """
    spent = 0.0
    for _ in range(_MOST_ADDED + 1):
        if cost_of(instance, fleet) >= cost * (1.0 - _MET):
            return None, spent
        routed = balance(instance.load, instance.utilization * fleet, decide=True)
        if routed is None:
            cuts.add(_for_the_stranded(instance, fleet))
            return None, spent
        spent += routed.work_s
        if routed.peak <= 1.0 + WHOLE:
            return fleet, spent
        cut = instance.utilization * routed.prices / routed.least
        cuts.add(cut)
        gain = np.where(fleet < instance.most, cut / np.maximum(instance.price, 1e-9), -math.inf)
        missing = 1.0 - float(cut @ fleet)
        enough = np.where(cut >= missing, -instance.price, -math.inf)
        enough = np.where(fleet < instance.most, enough, -math.inf)
        chosen = int(enough.argmax()) if np.isfinite(enough).any() else int(gain.argmax())
        fleet = fleet.copy()
        fleet[chosen] += 1.0
    return None, spent


def _for_the_stranded(instance: Instance, fleet: FloatArray) -> FloatArray:
    """The inequality that a fleet breaks which has no type for some bucket: that bucket alone must be served."""
    able = (instance.servable & (fleet > 0)[:, None]).any(axis=0)
    bucket = int(np.flatnonzero(~able)[0])
    cut: FloatArray = instance.utilization / instance.load[:, bucket]
    return cut
