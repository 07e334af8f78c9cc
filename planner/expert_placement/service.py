"""The straight line for expert placements: instance → search with a bound → answer.

Placements for the experts of a plan, by recorded routing, are in :mod:`meshplan.planner.expert_placement.placing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshplan.planner.core.certificate import Certificate
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.reading.instance_reader import AMOUNT, ARRAY, COUNT, TEXT, WHOLE, instance_schema
from meshplan.planner.core.stand_alone import answer_plan
from meshplan.planner.expert_placement.certify import certify_placement
from meshplan.planner.expert_placement.problem.objectives import Objective, RobustMeasure
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.problem.reader import KIND
from meshplan.planner.expert_placement.search.solve import answer, solve

SCHEMA = instance_schema(
    KIND,
    {
        "name": (TEXT, "of the instance"),
        "num_layers": (COUNT, "MoE layers L"),
        "num_experts": (COUNT, "experts E of a layer"),
        "num_devices": (COUNT, "devices"),
        "top_k": (COUNT, "experts that take a token; default 1"),
        "devices_per_node": (COUNT, "default: all devices in one node"),
        "num_redundant_experts": (WHOLE, "slots beyond one an expert, in each layer; default 0"),
        "objective": ({"enum": [objective.value for objective in Objective]}, "what is minimised"),
        "load": (ARRAY, "[L, E] tokens of each expert"),
        "scenarios": (ARRAY, "[S, L, E] the same, for each workload"),
        "scenario_names": ({"type": "array", "items": TEXT}, "of the workloads"),
        "robust_measure": ({"enum": [measure.value for measure in RobustMeasure]}, "over the workloads"),
        "transitions": (ARRAY, "[L - 1, E, E] tokens that go from an expert to one of the next layer"),
        "current": (ARRAY, "[L, slots] expert in each slot now"),
        "max_moved_experts": (WHOLE, "most slots that may change"),
        "min_balancedness": ({"type": "number", "minimum": 0, "maximum": 1}, "mean load over largest load"),
        "device_speed": (ARRAY, "relative speed of each device"),
        "expert_bytes": (AMOUNT, "weights of one expert"),
        "link_bandwidth_bytes_per_s": (AMOUNT, "inside a node, a device"),
        "network_bandwidth_bytes_per_s": (AMOUNT, "between nodes, a device"),
        "device_memory_slots": (WHOLE, "experts that a device has room for, over all layers"),
        "device_memory_bytes": (AMOUNT, "the same in bytes; goes with expert_bytes"),
        "num_expert_groups": (COUNT, "groups of the router's group-limited choice; default 1"),
    },
    required=("num_layers", "num_experts", "num_devices"),
)


def plan(question: Question) -> Plan:
    """Place experts on devices; see :func:`meshplan.planner.service.make_plan`."""
    problem = ExpertPlacementProblem.from_document(question.document, question.base)
    return answer_plan(question, problem, solve, answer)


def check(document: Mapping[str, Any]) -> None:
    """Read an instance; its array files lie in the working directory.

    Raises:
        SpecError: every problem of it.
    """
    ExpertPlacementProblem.from_document(document, Path())


def certify(question: Question, made: Plan) -> Certificate:
    """A second opinion on a placement; see :func:`meshplan.planner.service.make_plan`."""
    return certify_placement(ExpertPlacementProblem.from_document(question.document, question.base), made)
