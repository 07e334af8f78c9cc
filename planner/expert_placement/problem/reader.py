"""Reads an expert-placement instance and reports everything that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.reading.instance_reader import InstanceReader
from meshplan.planner.expert_placement.problem.objectives import Objective, RobustMeasure

KIND = "expert-placement"
KNOWN_KEYS = (
    "kind",
    "name",
    "num_layers",
    "num_experts",
    "top_k",
    "num_devices",
    "devices_per_node",
    "num_redundant_experts",
    "objective",
    "load",
    "scenarios",
    "transitions",
    "min_balancedness",
    "current",
    "max_moved_experts",
    "device_speed",
    "scenario_names",
    "expert_bytes",
    "link_bandwidth_bytes_per_s",
    "network_bandwidth_bytes_per_s",
    "device_memory_slots",
    "device_memory_bytes",
    "num_expert_groups",
    "robust_measure",
)


def read_fields(document: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The fields of an ``ExpertPlacementProblem``; see its ``from_document``."""
    return _Reader(document, base).read()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What every array is measured by: the problem's fields of the same names."""

    num_layers: int
    num_experts: int
    num_devices: int
    num_redundant_experts: int
    top_k: int
    devices_per_node: int

    @property
    def num_slots(self) -> int:
        return self.num_experts + self.num_redundant_experts


class _Reader(InstanceReader):
    """Reads one document; the problems are raised together at the end."""

    def __init__(self, document: Mapping[str, Any], base: Path) -> None:
        super().__init__(base)
        self._document = document

    def read(self) -> dict[str, Any]:
        self.keys(self._document, KNOWN_KEYS)
        self.one_of(self._document.get("kind", KIND), "kind", [KIND])
        sizes = self._sizes()
        objective = Objective(self._choice("objective", [objective.value for objective in Objective]))
        if sizes is None:
            raise SpecError(self)  # nothing below can be judged without the sizes
        self._check_slots(sizes)
        layer = (sizes.num_layers, sizes.num_experts)
        load = self._counts("load", layer, required=objective is not Objective.ROBUST)
        scenarios = self._scenarios(layer, required=objective is Objective.ROBUST)
        between = (sizes.num_layers - 1, sizes.num_experts, sizes.num_experts)
        transitions = self._counts("transitions", between, required=objective is Objective.BALANCE_AFFINITY)
        current = self._current(sizes, required=objective is Objective.MIGRATE)
        speed = self._speed(sizes.num_devices)
        floor = self._fraction("min_balancedness")
        max_moved = None if self._absent("max_moved_experts") else self._integer("max_moved_experts", least=0)
        amounts = {
            key: self._amount(key)
            for key in ("expert_bytes", "link_bandwidth_bytes_per_s", "network_bandwidth_bytes_per_s")
        }
        names = self._scenario_names(scenarios)
        self._check_memory(sizes, amounts["expert_bytes"])
        groups = self._integer("num_expert_groups", least=1, default=1) or 1
        if groups > 1:
            self._check_groups(groups, sizes, objective, speed)
        measure = RobustMeasure(self._choice("robust_measure", [measure.value for measure in RobustMeasure]))
        self.check()
        return {
            "name": str(self._document.get("name", KIND)),
            **asdict(sizes),
            "devices_per_node": min(sizes.devices_per_node, sizes.num_devices),
            "objective": objective,
            "load": _mean_of_scenarios(scenarios, layer) if load is None else load,
            "scenarios": scenarios,
            "transitions": transitions,
            "min_balancedness": floor,
            "current": current,
            "max_moved_experts": max_moved,
            "device_speed": speed,
            "scenario_names": names,
            "robust_measure": measure,
            "num_expert_groups": groups,
            **amounts,
        }

    def _absent(self, key: str) -> bool:
        return self._document.get(key) is None

    def _integer(self, key: str, *, least: int, default: int | None = None) -> int | None:
        if default is not None and self._absent(key):
            return default
        return self.integer(self._document.get(key), key, least=least)

    def _fraction(self, key: str) -> float:
        share = self.number(
            self._document.get(key, 0.0), key, "a number from 0 to 1", lambda share: 0.0 <= share <= 1.0
        )
        return share or 0.0

    def _amount(self, key: str) -> float | None:
        """A positive finite number, or None where the key is absent."""
        if self._absent(key):
            return None
        return self.number(self._document[key], key, "a finite number > 0", lambda number: number > 0.0)

    def _choice(self, key: str, known: list[str]) -> str:
        """One of the known names; the first is the default."""
        return self.one_of(self._document.get(key, known[0]), key, known)

    def _sizes(self) -> _Sizes | None:
        layers, experts, devices = (self._integer(key, least=1) for key in ("num_layers", "num_experts", "num_devices"))
        redundant = self._integer("num_redundant_experts", least=0, default=0)
        top_k = self._integer("top_k", least=1, default=1)
        per_node = self._integer("devices_per_node", least=1, default=devices or 1)
        if None in (layers, experts, devices, redundant, top_k, per_node):
            return None
        return _Sizes(
            num_layers=layers or 1,
            num_experts=experts or 1,
            num_devices=devices or 1,
            num_redundant_experts=redundant or 0,
            top_k=top_k or 1,
            devices_per_node=per_node or 1,
        )

    def _check_slots(self, sizes: _Sizes) -> None:
        experts, devices, redundant = sizes.num_experts, sizes.num_devices, sizes.num_redundant_experts
        slots = sizes.num_slots
        if slots % devices:
            add = devices - slots % devices
            self.say(
                "num_redundant_experts",
                f"{experts} experts + {redundant} redundant = {slots} slots cannot be divided evenly over {devices} "
                f"devices; {redundant + add} redundant experts can",
            )
        elif slots // devices > experts:
            most = experts * devices - experts
            self.say(
                "num_redundant_experts",
                f"{slots} slots / {devices} devices = {slots // devices} slots per device, more than the {experts} "
                f"experts that can lie there without a duplicate; at most {most} redundant experts are of use",
            )
        if sizes.top_k > experts:
            self.say("top_k", f"a token cannot visit {sizes.top_k} of {experts} experts")

    def _counts(self, key: str, shape: tuple[int, ...], *, required: bool) -> FloatArray | None:
        if self._absent(key):
            if required:
                self.say(key, f"is missing; objective {self._document.get('objective', 'balance')!r} needs it")
            return None
        return self._check_counts(key, self.shaped(self._document[key], key, shape))

    def _check_counts(self, key: str, counts: FloatArray | None) -> FloatArray | None:
        if counts is None:
            return None
        wrong = np.argwhere(~np.isfinite(counts) | (counts < 0))
        if len(wrong):
            where = "".join(f"[{index}]" for index in wrong[0].tolist())
            value = counts[tuple(wrong[0])]
            rule = "a count of tokens is a finite number >= 0"
            self.say(f"{key}{where}", f"is {value}; {rule} ({len(wrong)} such entries)")
            return None
        return counts

    def _scenarios(self, shape: tuple[int, int], *, required: bool) -> FloatArray | None:
        key = "scenarios"
        if self._absent(key):
            if required:
                self.say(key, "is missing; objective 'robust' needs it")
            return None
        array = self.array(self._document[key], key)
        if array is not None and (array.ndim != len(shape) + 1 or array.shape[1:] != shape or array.shape[0] == 0):
            self.say(key, f"has shape {list(array.shape)}, expected [scenarios >= 1, *{list(shape)}]")
            return None
        return self._check_counts(key, array)

    def _scenario_names(self, scenarios: FloatArray | None) -> tuple[str, ...]:
        names = self._document.get("scenario_names")
        if names is None:
            return ()
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.say("scenario_names", "is not a list of names, one per scenario")
            return ()
        if scenarios is not None and len(names) != scenarios.shape[0]:
            self.say("scenario_names", f"has {len(names)} names for {scenarios.shape[0]} scenarios")
        if len(set(names)) < len(names):
            self.say("scenario_names", "names two scenarios alike")
        return tuple(names)

    def _current(self, sizes: _Sizes, *, required: bool) -> IntArray | None:
        key = "current"
        if self._absent(key):
            if required:
                self.say(key, "is missing; objective 'migrate' needs the present physical_to_logical_map")
            return None
        array = self.shaped(self._document[key], key, (sizes.num_layers, sizes.num_slots))
        if array is None:
            return None
        wrong = np.argwhere((array < 0) | (array >= sizes.num_experts) | (array != np.floor(array)))
        if len(wrong):
            layer, slot = wrong[0].tolist()
            self.say(
                f"{key}[{layer}][{slot}]",
                f"is {array[layer, slot]:g}; expert ids are whole numbers from 0 to {sizes.num_experts - 1} "
                f"({len(wrong)} such entries)",
            )
            return None
        return array.astype(np.int64)

    def _speed(self, devices: int) -> FloatArray:
        key, ones = "device_speed", np.ones(devices)
        speed = None if self._absent(key) else self.shaped(self._document[key], key, (devices,))
        if speed is None:
            return ones
        legal = np.isfinite(speed) & (speed > 0)
        if not legal.all():
            device = int(np.argmin(legal))
            self.say(f"{key}[{device}]", f"is {speed[device]}; a speed is a finite number > 0")
            return ones
        # Only ratios count, and the exact searches of devices that are alike take their speed to be 1.
        relative: FloatArray = speed / speed.max()
        return relative

    def _check_memory(self, sizes: _Sizes, expert_bytes: float | None) -> None:
        """Every device must hold slots / devices experts per layer: engines' maps have equal numbers of slots."""
        key = "device_memory_bytes" if self._absent("device_memory_slots") else "device_memory_slots"
        if self._absent(key):
            return
        in_bytes = key == "device_memory_bytes"
        if in_bytes and expert_bytes is None:
            self.say("expert_bytes", "is missing; device_memory_bytes is counted in experts of this size")
            return
        capacity = self._check_counts(key, self.shaped(self._document[key], key, (sizes.num_devices,)))
        if capacity is None or sizes.num_slots % sizes.num_devices:
            return
        if in_bytes:
            capacity = np.floor(capacity / ((expert_bytes or 1.0) * sizes.num_layers))
        device, needed = int(capacity.argmin()), sizes.num_slots // sizes.num_devices
        if capacity[device] < needed:
            most = int(capacity[device]) * sizes.num_devices - sizes.num_experts
            fits = f"at most {most} redundant experts fit"
            fix = fits if most >= 0 else "use more devices: even one copy of each does not"
            self.say(
                f"{key}[{device}]",
                f"holds {int(capacity[device])} experts per layer, {sizes.num_slots} slots / {sizes.num_devices} "
                f"devices need {needed}; {fix}",
            )

    def _check_groups(self, groups: int, sizes: _Sizes, objective: Objective, speed: FloatArray) -> None:
        """Groups of experts that stay on one node: everything must divide evenly."""
        key, experts, redundant = "num_expert_groups", sizes.num_experts, sizes.num_redundant_experts
        nodes, rest = divmod(sizes.num_devices, sizes.devices_per_node)
        if rest:
            self.say(key, f"needs full nodes; {sizes.num_devices} devices are no multiple of {sizes.devices_per_node}")
            return
        if experts % groups or groups % nodes:
            self.say(key, f"{groups} groups must divide {experts} experts and be a multiple of {nodes} nodes")
        if redundant % nodes:
            self.say("num_redundant_experts", f"{redundant} must be a multiple of {nodes} nodes with expert groups")
        if objective is not Objective.BALANCE or bool((speed != speed[0]).any()):
            self.say(key, "goes with objective 'balance' and equal device speeds only")


def _mean_of_scenarios(scenarios: FloatArray | None, shape: tuple[int, int]) -> FloatArray:
    """Mean over scenarios of the loads, each layer normalised to 1."""
    if scenarios is None:
        return np.zeros(shape)
    totals = scenarios.sum(axis=2, keepdims=True)
    mean: FloatArray = np.divide(scenarios, totals, out=np.zeros_like(scenarios), where=totals > 0).mean(axis=0)
    return mean
