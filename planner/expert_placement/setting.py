"""From a training plan and recorded routing to an instance of expert placement, and its effect on the step time.

The plan gives the number of expert-parallel devices, the size of an expert and the bandwidth of the links; the
recordings give the load of the experts. Without a plan the setting is given by hand (:class:`ExpertSetting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.core.plan import Plan, shape_from_document
from meshplan.planner.expert_placement.problem.objectives import layer_balancedness
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.problem.recordings import ExpertRecording, read_recording

EXPERT_TERMS = ("experts", "expert-parallel communication")  # names in the plan's breakdown


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSetting:
    """Where the experts of a model live.

    Args:
        num_devices: expert-parallel devices.
        devices_per_node: expert-parallel devices in one scale-up domain.
        top_k: experts that a token visits.
        num_experts: routed experts per layer; None where only the recording tells.
        layer_ids: number of each MoE layer in the model, or empty where unknown.
        num_layers: all layers of the model, or None.
        expert_bytes: weights of one expert in one layer on one device, or None.
        link_bandwidth_bytes_per_s: bandwidth of one device inside its domain, or None.
        network_bandwidth_bytes_per_s: bandwidth of one device to other domains, or None.
        tokens_per_batch: tokens that all these devices together route in one pass of one layer, or None.
        step_s: optimizer step under balanced routing, or None.
        expert_s: part of the step in expert GEMMs and their exposed all-to-all, or None.
        is_sample: the recorded layers are some of the model's and stand for all.
    """

    num_devices: int
    devices_per_node: int
    top_k: int = 1
    num_experts: int | None = None
    layer_ids: tuple[int, ...] = ()
    num_layers: int | None = None
    expert_bytes: float | None = None
    link_bandwidth_bytes_per_s: float | None = None
    network_bandwidth_bytes_per_s: float | None = None
    tokens_per_batch: int | None = None
    step_s: float | None = None
    expert_s: float | None = None
    is_sample: bool = False


def setting_of_plan(plan: Plan, machine: Machine) -> ExpertSetting:
    """The setting of a training plan that spreads the experts over several devices.

    Args:
        plan: with a configuration.
        machine: the cluster that the plan was made for.

    Raises:
        SpecError: another kind of plan, a dense model, or all experts on every device.
    """
    if plan.kind != "training" or not plan.config:
        raise _error("PLAN", f"plan {plan.plan_id} ({plan.kind}, {plan.solution['status']}) has no experts to place")
    shape = shape_from_document(plan.provenance["model"])
    config = plan.config
    spread = int(config["expert_parallel"])
    if shape.moe is None:
        raise _error("PLAN", f"{shape.name} is a dense model")
    if spread == 1:
        raise _error(
            "PLAN",
            f"plan {plan.plan_id} keeps all {shape.moe.num_experts} experts on every device (expert_parallel 1); plan "
            "with, for example, fixed: {expert_parallel: 8}",
        )
    tensor = int(config["expert_tensor_parallel"])
    per_device = config["micro_batch_size"] * config["sequence_length"] / config["context_parallel"]
    per_device /= config["tensor_parallel"]
    return ExpertSetting(
        num_devices=spread,
        devices_per_node=max(1, min(spread, machine.domain_size // tensor)),
        top_k=shape.moe.num_experts_per_token,
        num_experts=shape.moe.num_experts,
        layer_ids=tuple(layer for layer, is_moe in enumerate(shape.moe.moe_layers) if is_moe),
        num_layers=shape.num_hidden_layers,
        expert_bytes=expert_bytes(shape) / tensor,
        link_bandwidth_bytes_per_s=machine.scale_up_bytes_per_s,
        network_bandwidth_bytes_per_s=machine.scale_out_bytes_per_s or None,
        tokens_per_batch=round(per_device * spread * tensor),
        step_s=plan.predicted["iteration_s"].value,
        expert_s=sum(float(row["seconds"]) for row in plan.breakdown if row["name"] in EXPERT_TERMS),
    )


def expert_bytes(shape: ModelShape) -> float:
    """Weights of one routed expert in one layer, 16 bits each; 0 for a dense model."""
    width = 0 if shape.moe is None else shape.moe.expert_intermediate_size
    return BYTES_16_BIT * shape.mlp_matrices * shape.hidden_size * width


def recording_format(path: Path) -> str:
    """The format of a recording by its name: see :mod:`meshplan.planner.expert_placement.problem.recordings`.

    Raises:
        SpecError: the name does not determine it.
    """
    if path.is_dir():
        return "trtllm" if (path / "meta_info.json").is_file() else "megatron"
    by_suffix = {".npz": "npz", ".csv": "csv", ".json": "sglang", ".pt": "sglang", ".jsonl": "vllm"}
    if path.suffix == ".jsonl" and path.name.startswith("router_trace"):
        return "megatron"
    if path.suffix not in by_suffix:
        raise _error(
            str(path), f"is a recording of an unknown kind; known are {', '.join(sorted(by_suffix))} or a folder"
        )
    return by_suffix[path.suffix]


def read_recordings(
    files: Mapping[str, Path], *, given_format: str | None = None, num_experts: int | None = None
) -> dict[str, ExpertRecording]:
    """Recordings by scenario name, all of one shape.

    Args:
        files: name → file or folder.
        given_format: format of all of them; by their names where None.
        num_experts: for formats without it.

    Raises:
        SpecError: malformed, or of different shapes.
    """
    read: dict[str, ExpertRecording] = {}
    for name, path in files.items():
        if not path.exists():
            raise _error(str(path), "does not exist")
        recording = read_recording(path, given_format or recording_format(path), num_experts=num_experts)
        first = next(iter(read.values()), recording)
        if recording.load.shape[1:] != first.load.shape[1:] or recording.layer_ids != first.layer_ids:
            raise _error(
                str(path),
                f"has {list(recording.load.shape[1:])} layers and experts (layers {recording.layer_ids[0]} …), the "
                f"recording before {list(first.load.shape[1:])} (layers {first.layer_ids[0]} …)",
            )
        read[name] = recording
    return read


def placement_document(
    setting: ExpertSetting,
    recordings: Mapping[str, ExpertRecording],
    *,
    num_redundant_experts: int = 0,
    separate_windows: bool = False,
    **other: Any,
) -> dict[str, Any]:
    """An instance for ``ExpertPlacementProblem.from_document``.

    Args:
        setting: the devices.
        recordings: scenario name → recording; several make the question ``robust`` unless ``other`` has an objective.
        num_redundant_experts: spare slots of a layer.
        separate_windows: every time window is a scenario.
        other: further keys (``objective``, ``max_moved_experts`` …).

    Raises:
        SpecError: the recording is of another model than the plan.
    """
    first = next(iter(recordings.values()))
    _check_model(setting, first)
    cases = {
        f"{name} {window}" if separate_windows and len(recording.load) > 1 else name: load
        for name, recording in recordings.items()
        for window, load in enumerate(recording.load if separate_windows else recording.load.sum(axis=0)[None])
    }
    objective = other.pop("objective", None) or ("robust" if len(cases) > 1 else "balance")
    document = first.to_document(
        num_devices=setting.num_devices,
        num_redundant_experts=num_redundant_experts,
        objective=objective,
        devices_per_node=setting.devices_per_node,
        top_k=min(setting.top_k, first.load.shape[2]),
        **other,
    )
    for key in ("load", "scenarios"):
        document.pop(key, None)
    if objective == "robust":
        document |= {"scenarios": np.stack(list(cases.values())), "scenario_names": list(cases)}
    else:
        document["load"] = np.sum(list(cases.values()), axis=0)
    transitions = [item.transitions for item in recordings.values() if item.transitions is not None]
    document.pop("transitions", None)
    if len(transitions) == len(recordings):
        document["transitions"] = np.sum(transitions, axis=0)
    for key in ("expert_bytes", "link_bandwidth_bytes_per_s", "network_bandwidth_bytes_per_s"):
        if getattr(setting, key):
            document[key] = getattr(setting, key)
    return document


def _check_model(setting: ExpertSetting, recording: ExpertRecording) -> None:
    _, layers, experts = recording.load.shape
    problems = []
    if setting.num_experts is not None and experts != setting.num_experts:
        message = f"holds {experts} experts per layer, the plan's model has {setting.num_experts}"
        problems.append(Problem(path="LOADS", message=message))
    if setting.layer_ids and layers not in (len(setting.layer_ids), setting.num_layers):
        message = (
            f"holds {layers} layers, the plan's model has {len(setting.layer_ids)} MoE layers of {setting.num_layers}"
        )
        problems.append(Problem(path="LOADS", message=message))
    if problems:
        raise SpecError(problems, of="the recording")


def emitted_layer_ids(setting: ExpertSetting, recording: ExpertRecording) -> tuple[int, ...]:
    """Number of each placed layer in the model: the plan's MoE layers where the recording merely counts."""
    counts_only = recording.layer_ids == tuple(range(len(recording.layer_ids)))
    if counts_only and len(setting.layer_ids) == len(recording.layer_ids):
        return setting.layer_ids
    return recording.layer_ids


def current_placement(problem: ExpertPlacementProblem) -> IntArray:
    """[L, S] the present map, else what frameworks start from: experts in order, one copy each.

    Where the experts do not divide evenly, the first ones are repeated to fill the spare slots.
    """
    if problem.current is not None:
        return problem.current
    experts = problem.num_experts
    slots = experts if experts % problem.num_devices == 0 else problem.num_slots
    return np.tile(np.arange(slots) % experts, (problem.num_layers, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEffect:
    """What a placement does to the optimizer step.

    Args:
        balanced_s: step under perfectly balanced routing, as the plan predicts it.
        before_s: with the current placement.
        after_s: with the new one.
        time_ratio: after / before; below 1 is faster.
    """

    balanced_s: float
    before_s: float
    after_s: float
    time_ratio: float


def step_effect(
    setting: ExpertSetting, load: FloatArray, speed: FloatArray, before: IntArray, after: IntArray
) -> StepEffect | None:
    """Step time with either placement; None where the setting has no step time.

    step = balanced step + (expert products + exposed all-to-all) · (mean over layers of 1 / balancedness − 1)

    Args:
        setting: with the times of a plan.
        load: [L, E] tokens.
        speed: [G].
        before: [L, S] current map.
        after: [L, S] new map.

    Assumes:
        The busiest device determines both the GEMMs and the all-to-all of a layer; the recorded layers are
        representative of all; the imbalance in the runs that the constants were fitted to is not subtracted.
    """
    if setting.step_s is None or setting.expert_s is None:
        return None
    slowdown = [float((1.0 / layer_balancedness(load, each, speed)).mean()) - 1.0 for each in (before, after)]
    first, second = (setting.step_s + setting.expert_s * extra for extra in slowdown)
    return StepEffect(balanced_s=setting.step_s, before_s=first, after_s=second, time_ratio=second / first)


def _error(where: str, message: str) -> SpecError:
    return SpecError.at(where, message, of="the question")
