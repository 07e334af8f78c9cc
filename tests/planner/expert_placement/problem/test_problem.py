"""Malformed instances are refused with every problem and its path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.expert_placement.problem.objectives import (
    Objective,
    balancedness,
    cross_device_fraction,
    cross_node_fraction,
    moved_experts,
)
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem

TINY: dict[str, Any] = {
    "kind": "expert-placement",
    "name": "tiny",
    "num_layers": 2,
    "num_experts": 4,
    "num_devices": 2,
    "num_redundant_experts": 2,
    "load": [[90, 40, 30, 20], [10, 10, 10, 70]],
}


def problems(document: dict[str, Any], base: Path = Path()) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        ExpertPlacementProblem.from_document(document, base)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_defaults_are_filled_in() -> None:
    problem = ExpertPlacementProblem.from_document(TINY, Path())
    assert problem.objective is Objective.BALANCE
    assert problem.devices_per_node == 2
    assert problem.slots_per_device == 3
    assert problem.device_speed.tolist() == [1.0, 1.0]
    assert problem.max_moved_experts is None


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"kind": "rank-mapping"}, "kind", "'rank-mapping'"),
        ({"num_layers": 0}, "num_layers", "whole number >= 1"),
        ({"num_experts": 4.0}, "num_experts", "whole number"),
        ({"num_devices": True}, "num_devices", "whole number"),
        ({"num_redundant_experts": -1}, "num_redundant_experts", "whole number >= 0"),
        ({"num_redundant_experts": 3}, "num_redundant_experts", "7 slots cannot be divided evenly over 2 devices; 4"),
        ({"num_redundant_experts": 6}, "num_redundant_experts", "at most 4 redundant experts"),
        ({"top_k": 5}, "top_k", "5 of 4"),
        ({"objective": "balanced"}, "objective", "did you mean 'balance'"),
        ({"loads": []}, "loads", "unknown key; did you mean 'load'?"),
        ({"load": [[1, 2, 3], [4, 5, 6]]}, "load", "shape [2, 3], expected [2, 4]"),
        ({"load": [[1, 2, 3, 4], [5, 6]]}, "load", "rows of different lengths"),
        ({"load": [["1", "2", "3", "4"]] * 2}, "load", "not a number"),
        ({"load": "many"}, "load", "nested lists"),
        ({"load": [[1, 2, 3, -4], [1, 2, 3, 4]]}, "load[0][3]", "is -4.0"),
        ({"load": [[1, 2, 3, 4], [1, float("nan"), 3, 4]]}, "load[1][1]", "is nan"),
        ({"load": None}, "load", "is missing"),
        ({"scenarios": [[[1] * 4]]}, "scenarios", "shape [1, 1, 4]"),
        ({"objective": "robust"}, "scenarios", "'robust' needs it"),
        ({"objective": "migrate"}, "current", "'migrate' needs"),
        ({"objective": "balance+affinity"}, "transitions", "needs it"),
        ({"transitions": [[[1] * 4] * 3]}, "transitions", "expected [1, 4, 4]"),
        ({"current": [[0, 1, 2, 3]] * 2}, "current", "shape [2, 4], expected [2, 6]"),
        ({"current": [[0, 1, 2, 3, 0, 4], [0, 1, 2, 3, 0, 1]]}, "current[0][5]", "from 0 to 3"),
        ({"current": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 0.5]]}, "current[1][5]", "whole numbers"),
        ({"max_moved_experts": -1}, "max_moved_experts", ">= 0"),
        ({"min_balancedness": 1.5}, "min_balancedness", "from 0 to 1"),
        ({"device_speed": [1.0]}, "device_speed", "expected [2]"),
        ({"device_speed": [1.0, 0.0]}, "device_speed[1]", "> 0"),
        ({"expert_bytes": 0}, "expert_bytes", "finite number > 0"),
        ({"link_bandwidth_bytes_per_s": float("inf")}, "link_bandwidth_bytes_per_s", "finite number > 0"),
        ({"network_bandwidth_bytes_per_s": "fast"}, "network_bandwidth_bytes_per_s", "'fast'"),
        ({"device_memory_slots": [4]}, "device_memory_slots", "expected [2]"),
        ({"device_memory_slots": [4, 2]}, "device_memory_slots[1]", "at most 0 redundant experts fit"),
        ({"device_memory_slots": [4, 1]}, "device_memory_slots[1]", "more devices"),
        ({"device_memory_slots": [4, -1]}, "device_memory_slots[1]", "is -1.0"),
        ({"device_memory_bytes": [100, 100]}, "expert_bytes", "is missing"),
        ({"device_memory_bytes": [60, 59], "expert_bytes": 10}, "device_memory_bytes[1]", "holds 2 experts"),
        ({"scenarios": [[[1] * 4] * 2], "scenario_names": ["a", "b"]}, "scenario_names", "2 names for 1"),
        ({"scenarios": [[[1] * 4] * 2] * 2, "scenario_names": ["a", "a"]}, "scenario_names", "alike"),
        ({"robust_measure": "mean"}, "robust_measure", "worst, average"),
        ({"scenario_names": "prefill"}, "scenario_names", "list of names"),
    ],
)
def test_each_mistake_is_named(change: dict[str, Any], path: str, says: str) -> None:
    document = {key: value for key, value in {**TINY, **change}.items() if value is not None}
    assert says in problems(document)[path]


def test_memory_that_just_suffices_is_accepted() -> None:
    """Three slots a device and layer, two layers, 10 bytes an expert."""
    shape = {**TINY, "expert_bytes": 10, "device_memory_bytes": [60, 60]}
    assert ExpertPlacementProblem.from_document(shape, Path()).expert_bytes == 10.0


def test_all_mistakes_are_reported_at_once() -> None:
    found = problems({**TINY, "load": [[1]], "device_speed": [-1, 1], "min_balancedness": 2, "lod": 1})
    assert set(found) == {"load", "device_speed[0]", "min_balancedness", "lod"}


def test_arrays_are_read_from_the_instances_folder(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", load=np.array(TINY["load"], dtype=np.uint32))
    document = {**TINY, "load": {"file": "data.npz", "key": "load"}}
    problem = ExpertPlacementProblem.from_document(document, tmp_path)
    assert problem.load.tolist() == [[90.0, 40.0, 30.0, 20.0], [10.0, 10.0, 10.0, 70.0]]


def test_quantities_by_hand() -> None:
    """Two devices with three slots: device 0 of layer 0 has 90/2 + 40 + 20/2, device 1 has 90/2 + 30 + 20/2."""
    load = np.array([[90.0, 40.0, 30.0, 20.0]])
    placement = np.array([[0, 1, 3, 0, 2, 3]])
    assert balancedness(load, placement, np.ones(2)) == pytest.approx(90 / 95)
    assert moved_experts(placement, np.array([[0, 1, 2, 0, 2, 3]]), 4, 2) == 1


def test_traffic_by_hand() -> None:
    """Experts 0 and 1 on device 0, 2 and 3 on device 1; two devices are two nodes, or one."""
    transitions = np.zeros((1, 4, 4))
    transitions[0, 0, 1] = 6  # stays
    transitions[0, 0, 2] = 2  # leaves
    placement = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    assert cross_device_fraction(transitions, placement, 2) == pytest.approx(0.25)
    assert cross_node_fraction(transitions, placement, 2, 1) == pytest.approx(0.25)
    assert cross_node_fraction(transitions, placement, 2, 2) == pytest.approx(0.0)
