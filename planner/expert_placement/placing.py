"""Places experts by recorded routing: the new placement, its comparison with the current one, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.core.solution import Solution, relative_gap, status_of
from meshplan.planner.expert_placement.advice.advice import (
    distinct_devices_per_token,
    redundancy_curve,
    regrets,
    sampled_balance,
    share_nodes_by_trace,
)
from meshplan.planner.expert_placement.advice.dispatch import fewer_visits
from meshplan.planner.expert_placement.advice.pareto import migration_curve, traffic_curve
from meshplan.planner.expert_placement.pictures import PlacementView, view
from meshplan.planner.expert_placement.problem.objectives import (
    Objective,
    cross_device_fraction,
    cross_node_fraction,
    duplicates_on_device,
)
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem, Placement
from meshplan.planner.expert_placement.problem.recordings import ExpertRecording
from meshplan.planner.expert_placement.search.solve import answer, objective_of, solve
from meshplan.planner.expert_placement.setting import (
    ExpertSetting,
    current_placement,
    emitted_layer_ids,
    placement_document,
    step_effect,
)

# Redundant slots per device on the curve of slots against balance.
SLOTS_PER_DEVICE = (0, 1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A placement by recorded routing.

    Args:
        setting: where the experts live.
        problem: what was asked.
        solution: what the solver found; its assignment is None where no placement exists.
        current: [L, S] map in force, or the order that frameworks start from.
        layer_ids: number of each placed layer in the model.
        document: everything as plain JSON.
    """

    setting: ExpertSetting
    problem: ExpertPlacementProblem
    solution: Solution[Placement]
    current: IntArray
    layer_ids: tuple[int, ...]
    document: Mapping[str, Any]

    @property
    def placement(self) -> IntArray:
        """[L, S] the new map; the current one where no placement exists."""
        return self.current if self.solution.assignment is None else self.solution.assignment.physical_to_logical_map


def place(
    setting: ExpertSetting,
    recordings: Mapping[str, ExpertRecording],
    *,
    num_redundant_experts: int = 0,
    separate_windows: bool = False,
    visits_at_balance: float | None = None,
    advice: bool = False,
    seed: int = 0,
    **choices: Any,
) -> Placed:
    """Place the experts.

    Args:
        setting: the devices.
        recordings: scenario name → recording.
        num_redundant_experts: spare slots of a layer.
        separate_windows: every time window is a scenario.
        visits_at_balance: least balancedness of each layer at which balance may be given up for fewer devices per token
            (DeepEP's dispatch sends a token once to each device); needs token traces. None gives up nothing.
        advice: add the curves (more solves).
        seed: random seed of the solver.
        choices: further keys of the instance (``objective``, ``min_balancedness``, ``max_moved_experts``).

    Raises:
        SpecError: what the recordings hold does not fit the plan, the devices or the question.
    """
    instance = placement_document(
        setting,
        recordings,
        num_redundant_experts=num_redundant_experts,
        separate_windows=separate_windows,
        **choices,
    )
    problem = ExpertPlacementProblem.from_document(instance, Path())
    solution = solve(problem, seed=seed)
    trace = _trace(recordings, problem)
    if visits_at_balance is not None:
        solution = _with_fewer_visits(problem, solution, trace, visits_at_balance)
    if trace is not None and solution.assignment is not None and _names_are_free(problem):
        renamed = share_nodes_by_trace(
            trace,
            solution.assignment.physical_to_logical_map,
            num_experts=problem.num_experts,
            num_devices=problem.num_devices,
            devices_per_node=problem.devices_per_node,
        )
        solution = replace(solution, assignment=Placement(physical_to_logical_map=renamed))
    first = next(iter(recordings.values()))
    placed = Placed(
        setting=setting,
        problem=problem,
        solution=solution,
        current=current_placement(problem),
        layer_ids=emitted_layer_ids(setting, first),
        document={},
    )
    return replace(placed, document=_document(placed, trace, advice=advice, seed=seed))


def keep_current(placed: Placed) -> Placed:
    """The current placement as the answer, where the new one is worse by a measure that the objective does not see."""
    problem, bound = placed.problem, placed.solution.bound
    reached = objective_of(problem, placed.current)
    solution = replace(
        placed.solution,
        status=placed.solution.status if bound is None else status_of(reached, bound),
        assignment=Placement(physical_to_logical_map=placed.current),
        objective=reached,
        gap=None if bound is None else relative_gap(reached, bound),
        solver=f"{placed.solution.solver}; the current one is faster",
    )
    left = {key: value for key, value in placed.document.items() if key not in ("sampled", "scenarios")}
    document = {**left, "answer": answer(problem, solution), "new": placed.document["today"]}
    return replace(placed, solution=solution, document=document)


def _trace(recordings: Mapping[str, ExpertRecording], problem: ExpertPlacementProblem) -> IntArray | None:
    """[L, tokens, top_k] the recorded tokens; None without traces."""
    traces = [item.token_experts for item in recordings.values() if item.token_experts is not None]
    if not traces:
        return None
    width = max(trace.shape[2] for trace in traces)
    padded = [np.pad(trace, ((0, 0), (0, 0), (0, width - trace.shape[2])), constant_values=-1) for trace in traces]
    return np.concatenate(padded, axis=1) if len(padded[0]) == problem.num_layers else None


def _with_fewer_visits(
    problem: ExpertPlacementProblem, solution: Solution[Placement], trace: IntArray | None, floor: float
) -> Solution[Placement]:
    """The solution with balance given up, down to the floor, for fewer devices per token."""
    if trace is None or problem.objective is not Objective.BALANCE:
        message = "fewer visits need token traces (megatron recordings) and objective 'balance'"
        raise SpecError.at("LOADS", message, of="the question")
    if solution.assignment is None or solution.bound is None:
        return solution
    start = solution.assignment.physical_to_logical_map
    found = fewer_visits(start, trace, problem.load, problem.device_speed, floor)
    reached = objective_of(problem, found)
    return replace(
        solution,
        status=status_of(reached, solution.bound),
        assignment=Placement(physical_to_logical_map=found),
        objective=reached,
        gap=relative_gap(reached, solution.bound),
        solver=f"{solution.solver}, then fewer visits",
    )


def _names_are_free(problem: ExpertPlacementProblem) -> bool:
    """Whether renaming devices layer by layer leaves the objective unchanged."""
    bound_to_names = problem.objective in (Objective.MIGRATE, Objective.BALANCE_AFFINITY)
    return not bound_to_names and problem.num_nodes > 1 and problem.num_expert_groups == 1


def _document(placed: Placed, trace: IntArray | None, *, advice: bool, seed: int) -> dict[str, Any]:
    problem, current = placed.problem, placed.current
    document: dict[str, Any] = {
        "question": {
            "objective": problem.objective.value,
            "num_layers": problem.num_layers,
            "num_experts": problem.num_experts,
            "num_devices": problem.num_devices,
            "devices_per_node": problem.devices_per_node,
            "num_redundant_experts": problem.num_redundant_experts,
        },
        "answer": answer(problem, placed.solution),
    }
    if placed.solution.assignment is None:
        return document
    document["today"] = _facts(problem, current, trace)
    document["new"] = _facts(problem, placed.placement, trace)
    effect = step_effect(placed.setting, problem.load, problem.device_speed, current, placed.placement)
    if effect is not None:
        document["step_time"] = asdict(effect)
    tokens = placed.setting.tokens_per_batch
    if tokens:
        sampled = sampled_balance(problem, placed.placement, tokens_per_batch=tokens, seed=seed)
        document["sampled"] = {"tokens_per_batch": tokens, **asdict(sampled)}
    common = regrets(problem, placed.placement, seed=seed)
    if common:
        document["scenarios"] = [asdict(item) for item in common]
    if advice:
        document["advice"] = _advice(problem, seed)
    return document


def _facts(problem: ExpertPlacementProblem, placement: IntArray, trace: IntArray | None) -> dict[str, Any]:
    """Balance and traffic of one map."""
    devices, per_node = problem.num_devices, problem.devices_per_node
    facts: dict[str, Any] = {
        "balancedness": float(problem.case_balancedness(placement).min()),
        "duplicates_on_device": duplicates_on_device(placement, devices),
    }
    if problem.transitions is not None:
        facts["cross_device_fraction"] = cross_device_fraction(problem.transitions, placement, devices)
        facts["cross_node_fraction"] = cross_node_fraction(problem.transitions, placement, devices, per_node)
    if trace is not None:
        for name, group in (("devices_per_token", 1), ("nodes_per_token", per_node)):
            visits = distinct_devices_per_token(
                trace,
                placement,
                num_experts=problem.num_experts,
                num_devices=devices,
                devices_per_group=group,
            )
            facts[name] = float(visits.mean())
    return facts


def _advice(problem: ExpertPlacementProblem, seed: int) -> dict[str, Any]:
    """The curves of slots and, where the problem has the data, of traffic and of moves."""
    experts, devices = problem.num_experts, problem.num_devices
    least = -experts % devices
    spare = [least + devices * each for each in SLOTS_PER_DEVICE]
    curves: dict[str, Any] = {
        "slots": [
            asdict(point)
            for point in redundancy_curve(problem, spare, bytes_per_expert=problem.expert_bytes or 0.0, seed=seed)
        ]
    }
    if problem.transitions is not None and problem.num_layers > 1:
        curves["traffic"] = [_without_map(asdict(point)) for point in traffic_curve(problem, seed=seed)]
    if problem.current is not None:
        curves["moves"] = [_without_map(asdict(point)) for point in migration_curve(problem, seed=seed)]
    return curves


def _without_map(point: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in point.items() if key != "placement"}


def views(placed: Placed) -> list[PlacementView]:
    """The current and the new placement, to be drawn."""
    problem = placed.problem
    return [
        view(name, each, problem.load, problem.device_speed, problem.transitions)
        for name, each in (("before", placed.current), ("after", placed.placement))
    ]
