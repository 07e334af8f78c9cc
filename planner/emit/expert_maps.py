"""An expert placement in the file formats of the programs that can load it.

===========  ==========================================================================================================
target       file
===========  ==========================================================================================================
sglang       ``--init-expert-location``: JSON with exactly one key, ``physical_to_logical_map`` [layers][slots]
trtllm       load-balancer YAML: ``num_slots``, ``initial_global_assignments`` {layer: [slots]},
             ``layer_updates_per_iter: 0`` (a static placement)
vllm         JSONL with one record ``eplb_initial_mapping`` (vllm-project/vllm pull request 41141; released versions
             have no static map)
vllm-ascend  JSON ``moe_layer_count``, ``layer_list`` [``layer_id``, ``device_count``, ``device_list``
             [``device_id``, ``device_expert``]]
megatron     JSON of checkpoint permutations: experts lie in contiguous blocks there, so the checkpoint is reordered
===========  ==========================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.catalogs.untrusted.quoting import yaml_text
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.emit.artifact import Artifact
from meshplan.planner.expert_placement.pictures import svg_picture
from meshplan.planner.expert_placement.placing import Placed, views
from meshplan.planner.expert_placement.problem.maps import MAP_KEY

VLLM_RECORD_TYPE = "eplb_initial_mapping"


def expert_map(
    target: str, placement: IntArray, *, num_experts: int, num_devices: int, layer_ids: Sequence[int] | None = None
) -> str:
    """Text of the file for ``target``.

    Args:
        target: see the module docstring.
        placement: [L, S] expert in each slot.
        num_experts: experts of a layer.
        num_devices: devices; slot i lies on device i // (S / num_devices).
        layer_ids: number of each MoE layer in the model, where the target names layers; default 0, 1, 2 …

    Raises:
        EmitError: unknown target, or layer_ids of another length.
        CannotExpressError: the target cannot express the placement.
    """
    if target not in _WRITERS:
        raise EmitError(f"no expert map for target {target!r}; known are {', '.join(_WRITERS)}")
    layers = list(range(placement.shape[0])) if layer_ids is None else [int(layer) for layer in layer_ids]
    if len(layers) != placement.shape[0]:
        raise EmitError(f"{len(layers)} layer ids for a placement of {placement.shape[0]} layers")
    return _WRITERS[target](placement, num_experts, num_devices, layers)


def _sglang(placement: IntArray, _experts: int, _devices: int, _layers: list[int]) -> str:
    return json.dumps({MAP_KEY: placement.tolist()}) + "\n"


def _trtllm(placement: IntArray, _experts: int, _devices: int, layers: list[int]) -> str:
    document = {
        "num_slots": int(placement.shape[1]),
        "initial_global_assignments": dict(zip(layers, placement.tolist(), strict=True)),
        "layer_updates_per_iter": 0,
    }
    return yaml_text(document, default_flow_style=None, width=10**6)


def _vllm(placement: IntArray, experts: int, _devices: int, _layers: list[int]) -> str:
    record = {
        "record_type": VLLM_RECORD_TYPE,
        "version": 1,
        "num_redundant_experts": int(placement.shape[1]) - experts,
        "num_slots": int(placement.shape[1]),
        # vLLM numbers the MoE layers alone, from 0.
        "initial_global_assignments": {str(layer): row for layer, row in enumerate(placement.tolist())},
    }
    return json.dumps(record) + "\n"


def _vllm_ascend(placement: IntArray, _experts: int, devices: int, _layers: list[int]) -> str:
    by_device = placement.reshape(placement.shape[0], devices, -1).tolist()
    document = {
        "moe_layer_count": int(placement.shape[0]),
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": devices,
                "device_list": [{"device_id": device, "device_expert": row} for device, row in enumerate(rows)],
            }
            for layer, rows in enumerate(by_device)
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _megatron(placement: IntArray, experts: int, devices: int, layers: list[int]) -> str:
    if placement.shape[1] != experts:
        spare = placement.shape[1] - experts
        raise CannotExpressError(
            "megatron", f"{spare} redundant experts a layer", "a placement with num_redundant_experts 0"
        )
    document: dict[str, Any] = {"num_experts": experts, "expert_model_parallel_size": devices, "layers": {}}
    for layer, row in zip(layers, placement, strict=True):
        # Expert weights and the rows of the router's weight (and of its bias) are taken in this order.
        document["layers"][str(layer)] = {
            "new_to_old_expert": row.tolist(),
            "old_to_new_expert": np.argsort(row, kind="stable").tolist(),
        }
    return json.dumps(document, indent=1) + "\n"


_WRITERS: dict[str, Callable[[IntArray, int, int, list[int]], str]] = {
    "sglang": _sglang,
    "trtllm": _trtllm,
    "vllm": _vllm,
    "vllm-ascend": _vllm_ascend,
    "megatron": _megatron,
}


MAP_NAMES = {
    "sglang": "expert_location.json",
    "trtllm": "moe_load_balancer.yaml",
    "vllm": "eplb_initial_mapping.jsonl",
    "vllm-ascend": "expert_map.json",
    "megatron": "expert_permutation.json",
}


def picture_artifact(placed: Placed, name: str) -> Artifact:
    """The SVG as a file of that name."""
    problem = placed.problem
    title = f"{problem.num_experts} experts on {problem.num_devices} devices, {problem.num_layers} layers"
    return Artifact(path=PurePosixPath(name), content=svg_picture(title, views(placed)))


def map_artifact(placed: Placed, target: str) -> Artifact:
    """The map in the format of ``target``.

    Raises:
        CannotExpressError: the target cannot express the placement.
    """
    if placed.setting.is_sample:
        layers = placed.problem.num_layers
        raise CannotExpressError(target, f"a map of {layers} of the model's MoE layers", "a recording of all of them")
    text = expert_map(
        target,
        placed.placement,
        num_experts=placed.problem.num_experts,
        num_devices=placed.problem.num_devices,
        layer_ids=placed.layer_ids,
    )
    return Artifact(path=PurePosixPath(MAP_NAMES[target]), content=text)
