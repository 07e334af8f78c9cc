"""Reads back the expert maps that :mod:`meshplan.planner.emit.expert_maps` writes, by each target's own format."""

from __future__ import annotations

import json

import numpy as np
import yaml

from meshplan.planner.core.arrays import IntArray
from meshplan.planner.emit.expert_maps import MAP_KEY


def read_expert_map(target: str, text: str) -> IntArray:
    """[L, S] placement from the text of a file of ``expert_map`` (Megatron: the order of its checkpoint)."""
    if target == "trtllm":
        rows = yaml.safe_load(text)["initial_global_assignments"]
        return np.array([rows[layer] for layer in sorted(rows)], dtype=np.int64)
    document = json.loads(text)
    if target == "sglang":
        return np.array(document[MAP_KEY], dtype=np.int64)
    if target == "vllm":
        rows = document["initial_global_assignments"]
        return np.array([rows[layer] for layer in sorted(rows, key=int)], dtype=np.int64)
    if target == "vllm-ascend":
        layers = sorted(document["layer_list"], key=lambda layer: int(layer["layer_id"]))
        return np.array(
            [[expert for device in layer["device_list"] for expert in device["device_expert"]] for layer in layers],
            dtype=np.int64,
        )
    rows = document["layers"]
    return np.array([rows[layer]["new_to_old_expert"] for layer in sorted(rows, key=int)], dtype=np.int64)
