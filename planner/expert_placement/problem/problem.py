"""The question "which expert, in how many copies, on which device?" as data.

A mixture-of-experts layer ends when its busiest device ends, so the placement of the experts sets the pace. What the
objectives mean: :mod:`meshplan.planner.expert_placement.problem.objectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.expert_placement.problem.objectives import Objective, RobustMeasure, balancedness
from meshplan.planner.expert_placement.problem.reader import read_fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPlacementProblem:
    """One expert-placement question; arrays are not written to.

    Args:
        name: what to call it.
        num_layers: MoE layers L.
        num_experts: routed experts of a layer E.
        top_k: experts a token visits in a layer.
        num_devices: expert-parallel devices G.
        devices_per_node: devices that share the fast links of one node.
        num_redundant_experts: spare slots of a layer beyond one for each expert.
        objective: see :class:`Objective`.
        load: [L, E] tokens; for ``robust`` without a load, the mean of the normalised scenarios.
        scenarios: [N, L, E] tokens of each scenario (``robust``), else None.
        transitions: [L − 1, E, E] tokens that go from expert e in layer l to expert f in layer l + 1, or None.
        min_balancedness: floor of the balancedness (``balance+affinity``).
        current: [L, S] present physical_to_logical_map, or None.
        max_moved_experts: most experts that may move (``migrate``); None is no limit.
        device_speed: [G] speed over that of the fastest device, 1 unless stated.
        robust_measure: see :class:`RobustMeasure`.
        scenario_names: names of the scenarios (``prefill``, ``decode``, a domain, a time window), or empty.
        expert_bytes: weights of one expert in one layer, or None.
        link_bandwidth_bytes_per_s: bandwidth of one device to the others of its node, each direction, or None.
        network_bandwidth_bytes_per_s: bandwidth of one device to other nodes, or None.
        num_expert_groups: runs of experts (E / groups each) whose copies all lie on one node, so that a router that
            limits a token to few groups limits it to few nodes (DeepSeek-V3, arXiv:2412.19437); 1 is no such rule.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    num_devices: int
    devices_per_node: int
    num_redundant_experts: int
    objective: Objective
    load: FloatArray
    scenarios: FloatArray | None = None
    transitions: FloatArray | None = None
    min_balancedness: float = 0.0
    current: IntArray | None = None
    max_moved_experts: int | None = None
    device_speed: FloatArray
    robust_measure: RobustMeasure = RobustMeasure.WORST
    scenario_names: tuple[str, ...] = ()
    expert_bytes: float | None = None
    link_bandwidth_bytes_per_s: float | None = None
    network_bandwidth_bytes_per_s: float | None = None
    num_expert_groups: int = 1

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps partly used."""
        return -(-self.num_devices // self.devices_per_node)

    @property
    def num_slots(self) -> int:
        """Slots of one layer over all devices."""
        return self.num_experts + self.num_redundant_experts

    @property
    def slots_per_device(self) -> int:
        """Slots of one layer on one device."""
        return self.num_slots // self.num_devices

    @property
    def load_cases(self) -> FloatArray:
        """[N, L, E]: the loads the placement must serve, one case unless the objective is ``robust``."""
        if self.objective is Objective.ROBUST and self.scenarios is not None:
            return self.scenarios
        return self.load[None]

    def case_balancedness(self, placement: IntArray) -> FloatArray:
        """[N] balancedness of each load case."""
        return np.array([balancedness(case, placement, self.device_speed) for case in self.load_cases])

    def over_cases(self, balances: FloatArray) -> float:
        """What the objective makes of the [N] balancedness of the load cases: the smallest, or the mean."""
        averages = self.objective is Objective.ROBUST and self.robust_measure is RobustMeasure.AVERAGE
        return float(balances.mean() if averages else balances.min())

    @classmethod
    def from_document(cls, document: Mapping[str, Any], base: Path) -> ExpertPlacementProblem:
        """Read an instance; arrays are lists, or ``{"file", "key"}`` of an .npz beside the instance.

        Args:
            document: the instance.
            base: folder of the instance, the only one arrays are read from (and never with pickle).

        Raises:
            SpecError: with every problem found and its path.
        """
        return cls(**read_fields(document, base))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """The decision.

    Args:
        physical_to_logical_map: [L, S] expert in each slot; slot i lies on device i // slots_per_device.
    """

    physical_to_logical_map: IntArray
