"""Reads an expert-placement instance and reports everything that is wrong with it at once."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.errors import Problem, SpecError, closest_names, did_you_mean
from meshplan.planner.core.arrays import FloatArray, IntArray
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
NUMERIC_KINDS = "iuf"  # NumPy's signed, unsigned and floating dtypes
COUNT_HINT = "a count of tokens is a finite number >= 0"


def read_fields(document: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The fields of an ``ExpertPlacementProblem``; see its ``from_document``."""
    return _Reader(document, base).read()


class _Reader:
    """Collects problems while it reads; raises them together at the end."""

    def __init__(self, document: Mapping[str, Any], base: Path) -> None:
        self.document = document
        self.base = base
        self.problems: list[Problem] = []

    def complain(self, path: str, message: str) -> None:
        self.problems.append(Problem(path=path, message=message))

    def read(self) -> dict[str, Any]:
        self._check_keys()
        sizes = {
            "num_layers": self._integer("num_layers", least=1),
            "num_experts": self._integer("num_experts", least=1),
            "num_devices": self._integer("num_devices", least=1),
            "num_redundant_experts": self._integer("num_redundant_experts", least=0, default=0),
        }
        top_k = self._integer("top_k", least=1, default=1)
        devices_per_node = self._integer("devices_per_node", least=1, default=sizes["num_devices"] or 1)
        objective = self._objective()
        if None in (*sizes.values(), top_k, devices_per_node):
            raise SpecError(self.problems)  # nothing below can be judged without the sizes
        layers, experts, devices, redundant = (int(value or 0) for value in sizes.values())
        self._check_slots(experts, devices, redundant, top_k or 1)
        slots = experts + redundant

        load = self._counts("load", (layers, experts), required=objective is not Objective.ROBUST)
        scenarios = self._scenarios((layers, experts), required=objective is Objective.ROBUST)
        transitions = self._counts(
            "transitions", (layers - 1, experts, experts), required=objective is Objective.BALANCE_AFFINITY
        )
        current = self._current((layers, slots), experts, required=objective is Objective.MIGRATE)
        speed = self._speed(devices)
        floor = self._fraction("min_balancedness", default=0.0)
        max_moved = self._integer("max_moved_experts", least=0, default=-1)
        amounts = {
            key: self._amount(key)
            for key in ("expert_bytes", "link_bandwidth_bytes_per_s", "network_bandwidth_bytes_per_s")
        }
        names = self._scenario_names(scenarios)
        self._check_memory(devices, experts, slots, layers, amounts["expert_bytes"])
        groups = self._integer("num_expert_groups", least=1, default=1)
        if (groups or 1) > 1:
            self._check_groups(groups or 1, experts, devices, devices_per_node or devices, redundant, objective, speed)
        measure = RobustMeasure(self._one_of("robust_measure", [measure.value for measure in RobustMeasure]))
        if self.problems:
            raise SpecError(self.problems)
        if load is None:
            load = _mean_of_scenarios(scenarios, (layers, experts))
        return {
            "name": str(self.document.get("name", KIND)),
            "num_layers": layers,
            "num_experts": experts,
            "top_k": top_k or 1,
            "num_devices": devices,
            "devices_per_node": min(devices_per_node or devices, devices),
            "num_redundant_experts": redundant,
            "objective": objective,
            "load": load,
            "scenarios": scenarios,
            "transitions": transitions,
            "min_balancedness": floor,
            "current": current,
            "max_moved_experts": None if max_moved is None or max_moved < 0 else max_moved,
            "device_speed": speed,
            "scenario_names": names,
            "robust_measure": measure,
            "num_expert_groups": groups,
            **amounts,
        }

    def _check_keys(self) -> None:
        if self.document.get("kind", KIND) != KIND:
            self.complain("kind", f"is {self.document['kind']!r}, not {KIND!r}")
        for key in self.document:
            if key not in KNOWN_KEYS:
                self.complain(str(key), f"unknown key{did_you_mean(closest_names(str(key), KNOWN_KEYS))}")

    def _integer(self, key: str, *, least: int, default: int | None = None) -> int | None:
        value = self.document.get(key)
        if value is None:
            if default is None:
                self.complain(key, f"is missing; give a whole number >= {least}")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.complain(key, f"is {value!r}; give a whole number >= {least}")
            return None
        if value < least:
            self.complain(key, f"is {value}; give a whole number >= {least}")
            return None
        return value

    def _fraction(self, key: str, *, default: float) -> float:
        value = self.document.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            self.complain(key, f"is {value!r}; give a number from 0 to 1")
            return default
        return float(value)

    def _amount(self, key: str) -> float | None:
        """A positive finite number, or None where the key is absent."""
        value = self.document.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
            self.complain(key, f"is {value!r}; give a finite number > 0")
            return None
        return float(value)

    def _scenario_names(self, scenarios: FloatArray | None) -> tuple[str, ...]:
        names = self.document.get("scenario_names")
        if names is None:
            return ()
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.complain("scenario_names", "is not a list of names, one for each scenario")
            return ()
        if scenarios is not None and len(names) != scenarios.shape[0]:
            self.complain("scenario_names", f"has {len(names)} names for {scenarios.shape[0]} scenarios")
        if len(set(names)) < len(names):
            self.complain("scenario_names", "names two scenarios alike")
        return tuple(names)

    def _check_memory(self, devices: int, experts: int, slots: int, layers: int, expert_bytes: float | None) -> None:
        """Every device must hold slots / devices experts of each layer: no consumer's map has room for uneven slots."""
        capacity, key = None, "device_memory_slots"
        if self.document.get(key) is not None:
            capacity = self._capacity(key, devices)
        elif self.document.get("device_memory_bytes") is not None:
            key = "device_memory_bytes"
            if expert_bytes is None:
                self.complain("expert_bytes", "is missing; device_memory_bytes is counted in experts of this size")
                return
            capacity = self._capacity(key, devices)
            if capacity is not None:
                capacity = np.floor(capacity / (expert_bytes * layers))
        if capacity is None or slots % devices:
            return
        device = int(capacity.argmin())
        if capacity[device] < slots // devices:
            most = int(capacity[device]) * devices - experts
            fix = (
                f"at most {most} redundant experts fit"
                if most >= 0
                else "use more devices: even one copy of each does not"
            )
            self.complain(
                f"{key}[{device}]",
                f"holds {int(capacity[device])} experts of a layer, {slots} slots / {devices} devices need "
                f"{slots // devices}; {fix}",
            )

    def _check_groups(
        self,
        groups: int,
        experts: int,
        devices: int,
        devices_per_node: int,
        redundant: int,
        objective: Objective,
        speed: FloatArray,
    ) -> None:
        """Groups of experts that stay on one node: everything must divide evenly."""
        key = "num_expert_groups"
        if devices % devices_per_node:
            self.complain(key, f"needs full nodes; {devices} devices are no multiple of {devices_per_node} a node")
            return
        nodes = devices // devices_per_node
        if experts % groups or groups % nodes:
            self.complain(key, f"{groups} groups must divide {experts} experts and be a multiple of {nodes} nodes")
        if redundant % nodes:
            self.complain(
                "num_redundant_experts", f"{redundant} must be a multiple of {nodes} nodes with expert groups"
            )
        if objective is not Objective.BALANCE or bool((speed != speed[0]).any()):
            self.complain(key, "goes with objective 'balance' and equal device speeds only")

    def _capacity(self, key: str, devices: int) -> FloatArray | None:
        array = self._array(key)
        if array is None or not self._has_shape(key, array, (devices,)):
            return None
        return self._check_counts(key, array)

    def _objective(self) -> Objective:
        return Objective(self._one_of("objective", [objective.value for objective in Objective]))

    def _one_of(self, key: str, known: list[str]) -> str:
        """One of the known words; the first is the default."""
        value = self.document.get(key, known[0])
        if value not in known:
            near = did_you_mean(closest_names(str(value), known))
            self.complain(key, f"is {value!r}; known are {', '.join(known)}{near}")
            return known[0]
        return str(value)

    def _check_slots(self, experts: int, devices: int, redundant: int, top_k: int) -> None:
        slots = experts + redundant
        if slots % devices:
            add = devices - slots % devices
            self.complain(
                "num_redundant_experts",
                f"{experts} experts + {redundant} redundant = {slots} slots cannot be divided evenly over {devices} "
                f"devices; {redundant + add} redundant experts can",
            )
        elif slots // devices > experts:
            most = experts * devices - experts
            self.complain(
                "num_redundant_experts",
                f"{slots} slots / {devices} devices = {slots // devices} slots a device, more than the {experts} "
                f"experts that can lie there without a duplicate; at most {most} redundant experts are of use",
            )
        if top_k > experts:
            self.complain("top_k", f"a token cannot visit {top_k} of {experts} experts")

    def _array(self, key: str) -> NDArray[Any] | None:
        """The array under ``key`` with a numeric dtype, or None with the complaint made."""
        value = self.document[key]
        array = self._array_from_file(key, value) if isinstance(value, Mapping) else self._array_from_list(key, value)
        if array is not None and array.dtype.kind not in NUMERIC_KINDS:
            self.complain(key, "holds something that is not a number, or rows of different lengths")
            return None
        return array

    def _array_from_list(self, key: str, value: Any) -> NDArray[Any] | None:
        if not isinstance(value, list | np.ndarray):
            self.complain(key, f"is {type(value).__name__}; give nested lists or {{'file': …, 'key': …}}")
            return None
        try:
            return np.asarray(value)
        except (ValueError, OverflowError):
            self.complain(key, "has rows of different lengths, or a number too large")
            return None

    def _array_from_file(self, key: str, value: Mapping[str, Any]) -> NDArray[Any] | None:
        name, entry = value.get("file"), value.get("key")
        if set(value) != {"file", "key"} or not isinstance(name, str) or not isinstance(entry, str):
            self.complain(key, f"is {json.dumps(value, default=str)}; give {{'file': 'NAME.npz', 'key': 'NAME'}}")
            return None
        path = self.base / name
        if Path(name).is_absolute() or path.resolve().parent != self.base.resolve():
            self.complain(f"{key}.file", f"{name!r} does not lie beside the instance; copy it there")
            return None
        if not path.is_file():
            self.complain(f"{key}.file", f"{name!r} does not exist beside the instance")
            return None
        if not zipfile.is_zipfile(path):
            self.complain(f"{key}.file", f"{name!r} is not an .npz of plain numbers; save it with numpy.savez")
            return None
        try:
            with np.load(path, allow_pickle=False) as archive:
                if entry not in archive.files:
                    near = did_you_mean(closest_names(entry, archive.files))
                    self.complain(f"{key}.key", f"{name!r} has no array {entry!r}{near}")
                    return None
                return np.asarray(archive[entry])
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            self.complain(f"{key}.file", f"{name!r} is not an .npz of plain numbers: {error}")
            return None

    def _counts(self, key: str, shape: tuple[int, ...], *, required: bool) -> FloatArray | None:
        if self.document.get(key) is None:
            if required:
                self.complain(key, f"is missing; objective {self.document.get('objective', 'balance')!r} needs it")
            return None
        array = self._array(key)
        if array is None or not self._has_shape(key, array, shape):
            return None
        return self._check_counts(key, array.reshape(shape))

    def _check_counts(self, key: str, array: NDArray[Any]) -> FloatArray | None:
        counts = array.astype(np.float64)
        wrong = ~np.isfinite(counts) | (counts < 0)
        if wrong.any():
            where = "".join(f"[{int(index)}]" for index in np.argwhere(wrong)[0])
            first = counts[tuple(np.argwhere(wrong)[0])]
            self.complain(f"{key}{where}", f"is {first}; {COUNT_HINT} ({int(wrong.sum())} such entries)")
            return None
        return counts

    def _has_shape(self, key: str, array: NDArray[Any], shape: tuple[int, ...]) -> bool:
        # A single layer has no transitions: an empty list is the natural way to write [0][E][E].
        if array.shape != shape and not (array.size == 0 and 0 in shape):
            self.complain(key, f"has shape {list(array.shape)}, expected {list(shape)}")
            return False
        return True

    def _scenarios(self, shape: tuple[int, int], *, required: bool) -> FloatArray | None:
        if self.document.get("scenarios") is None:
            if required:
                self.complain("scenarios", "is missing; objective 'robust' needs it")
            return None
        array = self._array("scenarios")
        if array is None:
            return None
        if array.ndim != len(shape) + 1 or array.shape[1:] != shape or array.shape[0] == 0:
            self.complain("scenarios", f"has shape {list(array.shape)}, expected [scenarios >= 1, *{list(shape)}]")
            return None
        return self._check_counts("scenarios", array)

    def _current(self, shape: tuple[int, int], experts: int, *, required: bool) -> IntArray | None:
        if self.document.get("current") is None:
            if required:
                self.complain("current", "is missing; objective 'migrate' needs the present physical_to_logical_map")
            return None
        array = self._array("current")
        if array is None or not self._has_shape("current", array, shape):
            return None
        wrong = (array < 0) | (array >= experts) | (array != np.floor(array))
        if wrong.any():
            layer, slot = (int(index) for index in np.argwhere(wrong)[0])
            self.complain(
                f"current[{layer}][{slot}]",
                f"is {array[layer, slot]}; expert ids are whole numbers from 0 to {experts - 1} "
                f"({int(wrong.sum())} such entries)",
            )
            return None
        return array.astype(np.int64)

    def _speed(self, devices: int) -> FloatArray:
        ones = np.ones(devices)
        if self.document.get("device_speed") is None:
            return ones
        array = self._array("device_speed")
        if array is None or not self._has_shape("device_speed", array, (devices,)):
            return ones
        speed = array.astype(np.float64)
        if not np.all(np.isfinite(speed) & (speed > 0)):
            device = int(np.argmin(np.isfinite(speed) & (speed > 0)))
            self.complain(f"device_speed[{device}]", f"is {speed[device]}; a speed is a finite number > 0")
            return ones
        return speed


def _mean_of_scenarios(scenarios: FloatArray | None, shape: tuple[int, int]) -> FloatArray:
    """Mean over scenarios of the loads, each layer normalised to 1."""
    if scenarios is None:
        return np.zeros(shape)
    totals = scenarios.sum(axis=2, keepdims=True)
    mean: FloatArray = np.divide(scenarios, totals, out=np.zeros_like(scenarios), where=totals > 0).mean(axis=0)
    return mean
