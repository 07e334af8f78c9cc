"""A second opinion on an expert placement: every number summed slot by slot, and CBC on small layers.

Without copies a layer is a program of its own: x_ed = 1 where expert e lies on device d,

    min t   with   Σ_d x_ed = 1,   Σ_e x_ed = slots of a device,   Σ_e load_e · x_ed ≤ speed_d · t,

and the balancedness of the whole is the mean over layers of Σ load / Σ speed / t.
"""

from __future__ import annotations

import math
from typing import Any

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.certificate import Certificate, Check, none_better, same_value
from meshplan.planner.core.milp import Program, solve_program
from meshplan.planner.core.plan import Plan
from meshplan.planner.expert_placement.problem.objectives import Objective
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem

BACKEND = "cbc"
# Columns of one layer, and layers, up to which CBC comes to an end within seconds.
MOST_COLUMNS, MOST_LAYERS = 40, 64


def certify_placement(problem: ExpertPlacementProblem, plan: Plan) -> Certificate:
    """Hold a placement against CBC, where it is small, and against its own sums."""
    if not plan.answer or "physical_to_logical_map" not in plan.answer:
        return Certificate(method="none", covers="a question without an answer", checks=())
    own = _own_numbers(problem, plan.answer)
    small = problem.num_experts * problem.num_devices <= MOST_COLUMNS and problem.num_layers <= MOST_LAYERS
    plain = problem.objective is Objective.BALANCE and problem.num_expert_groups == 1
    if not (small and plain and not problem.num_redundant_experts):
        covers = "what is claimed of the placement; its bound only for balance without copies in small layers"
        return Certificate(method="sums over the slots", covers=covers, checks=own)
    best = math.fsum(_best_balance(load, problem) for load in problem.load) / problem.num_layers
    checks = (*own, none_better("no balancedness above", plan.solution["bound"], best, maximise=True))
    if plan.solution["status"] == "optimal":
        checks = (*checks, same_value("best balancedness", plan.solution["objective"], best))
    return Certificate(
        method="a mixed-integer program for each layer by CBC, instead of exchange and exact search",
        covers="the whole question",
        checks=checks,
    )


def layer_program(load: FloatArray, speed: FloatArray, slots: int) -> Program:
    """The program of the module's text for one layer without copies; column 0 is t.

    Args:
        load: [E] in units of the time that the whole layer takes at best.
        speed: [G].
        slots: experts of each device.
    """
    program = Program()
    time = program.column("time", 0.0, math.inf, cost=1.0)
    columns = [
        [program.column(f"{e} on {d}", 0.0, 1.0, whole=True) for d in range(len(speed))] for e in range(len(load))
    ]
    for e, row in enumerate(columns):
        program.row(f"expert {e}", dict.fromkeys(row, 1.0), low=1.0, high=1.0)
    for d, fast in enumerate(speed.tolist()):
        held = [row[d] for row in columns]
        program.row(f"slots of {d}", dict.fromkeys(held, 1.0), low=float(slots), high=float(slots))
        busy = dict(zip(held, load.tolist(), strict=True))
        program.row(f"time of {d}", {**busy, time: -fast}, high=0.0)
    return program


def _best_balance(load: FloatArray, problem: ExpertPlacementProblem) -> float:
    """Balancedness of one layer's best placement."""
    total = float(load.sum())
    if total == 0.0:
        return 1.0
    speed = problem.device_speed
    program = layer_program(load * (float(speed.sum()) / total), speed, problem.slots_per_device)
    return 1.0 / solve_program(program, BACKEND).objective


def _own_numbers(problem: ExpertPlacementProblem, answer: Any) -> tuple[Check, ...]:
    """Legality, balancedness, traffic and moves, slot by slot."""
    rows, devices, size = answer["physical_to_logical_map"], problem.num_devices, problem.slots_per_device
    parts = [[row[d * size : (d + 1) * size] for d in range(devices)] for row in rows]
    legal = all(set(row) == set(range(problem.num_experts)) for row in rows)
    twice = sum(len(part) - len(set(part)) for row in parts for part in row)
    checks = [
        Check(what="every expert is placed", stated="yes", found="yes" if legal else "no", agrees=legal),
        Check(what="copies beside each other", stated=0.0, found=float(twice), agrees=twice == 0),
    ]
    balances = [_balancedness(case, rows, parts, problem) for case in problem.load_cases.tolist()]
    checks.append(same_value("balancedness", answer["balancedness"], min(balances)))
    if problem.transitions is not None:
        crossing = _cross_device(problem.transitions.tolist(), rows, parts)
        checks.append(same_value("share of transitions between devices", answer["cross_device_fraction"], crossing))
    if problem.current is not None:
        now = problem.current.tolist()
        held = [[row[d * size : (d + 1) * size] for d in range(devices)] for row in now]
        moved = sum(
            len(set(new) - set(old))
            for news, olds in zip(parts, held, strict=True)
            for new, old in zip(news, olds, strict=True)
        )
        checks.append(same_value("experts moved", float(answer["moved_experts"]), float(moved)))
    return tuple(checks)


def _balancedness(load: Any, rows: Any, parts: Any, problem: ExpertPlacementProblem) -> float:
    speed = problem.device_speed.tolist()
    values = []
    for layer, row, devices in zip(load, rows, parts, strict=True):
        copies = {expert: row.count(expert) for expert in set(row)}
        times = [
            math.fsum(layer[expert] / copies[expert] for expert in part) / fast
            for part, fast in zip(devices, speed, strict=True)
        ]
        values.append(math.fsum(layer) / math.fsum(speed) / max(times) if max(times) > 0 else 1.0)
    return math.fsum(values) / len(values)


def _cross_device(transitions: Any, rows: Any, parts: Any) -> float:
    total = math.fsum(value for table in transitions for row in table for value in row)
    same = 0.0
    for layer, table in enumerate(transitions):
        here = {expert: rows[layer].count(expert) for expert in set(rows[layer])}
        after = {expert: rows[layer + 1].count(expert) for expert in set(rows[layer + 1])}
        for mine, theirs in zip(parts[layer], parts[layer + 1], strict=True):
            same += math.fsum(table[e][f] / here[e] / after[f] for e in mine for f in theirs)
    return 1.0 - same / total if total else 0.0
