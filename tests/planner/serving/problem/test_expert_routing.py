"""Routing in a serving spec: what is read, what is refused with words, and layouts that a map does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.problems import Problems
from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.expert_routing import ExpertRouting, ExpertRoutingSpec, expert_routing, zipf_load
from meshplan.planner.serving.service import plan

DEEPSEEK, MIXTRAL, LLAMA = "deepseek-v3", "mixtral-8x7b", "llama-3.1-8b"


def read(catalog: Catalog, folder: Path, model: str, **said: Any) -> ExpertRouting | None:
    problems = Problems()
    found = expert_routing(ExpertRoutingSpec(**said), catalog.model_shape(model), folder, problems)
    problems.check()
    return found


def write_map(folder: Path, rows: Any) -> str:
    (folder / "map.json").write_text(json.dumps({"physical_to_logical_map": rows}))
    return "map.json"


def test_shares_of_a_named_skew(catalog: Catalog, tmp_path: Path) -> None:
    found = read(catalog, tmp_path, MIXTRAL, zipf=1.0)
    assert found is not None
    harmonic = sum(1.0 / rank for rank in range(1, 9))
    expected = [1.0 / rank / harmonic for rank in range(8, 0, -1)]
    assert np.sort(found.load, axis=1) == pytest.approx(np.tile(expected, (32, 1)))
    assert zipf_load(2, 4, 0.0).tolist() == [[0.25] * 4] * 2


def test_dense_layers_of_a_recording_are_left_out(catalog: Catalog, tmp_path: Path) -> None:
    load = np.arange(61 * 256, dtype=float).reshape(61, 256)
    np.savez(tmp_path / "all.npz", load=np.stack([load, load]))
    found = read(catalog, tmp_path, DEEPSEEK, loads="all.npz")
    assert found is not None
    assert found.load == pytest.approx(load[3:] / load[3:].sum(axis=1, keepdims=True))


def test_a_layer_without_load_is_even(catalog: Catalog, tmp_path: Path) -> None:
    np.savez(tmp_path / "few.npz", load=np.stack([np.zeros(8), np.arange(8)]))
    found = read(catalog, tmp_path, MIXTRAL, loads="few.npz")
    assert found is not None
    assert found.load[0].tolist() == [0.125] * 8


@pytest.mark.parametrize(
    ("model", "said", "message"),
    [
        (LLAMA, {"zipf": 1.0}, "is a dense model; leave experts out"),
        (MIXTRAL, {"loads": "none.npz"}, "does not exist"),
        (MIXTRAL, {"loads": "wide.npz"}, "16 experts per layer, Mixtral 8x7B v0.1 has 8"),
        (MIXTRAL, {"loads": "deep.npz"}, "holds 40 layers, Mixtral 8x7B v0.1 has 32 MoE layers"),
        (MIXTRAL, {"loads": "plain.npz", "dispatch": "stays"}, "needs transitions from layer to layer"),
        (MIXTRAL, {"loads": "plain.npz", "placement": "map.json"}, "has 2 layers, recorded: plain.npz has 3"),
        (MIXTRAL, {"zipf": 0.0, "placement": "lacks.json"}, "layer 0 has no slot for expert 7"),
        (MIXTRAL, {"zipf": 0.0, "placement": "wild.json"}, "experts outside 0..7"),
        (MIXTRAL, {"zipf": 0.0, "placement": "ragged.json"}, "different lengths"),
        (MIXTRAL, {"zipf": 0.0, "placement": "text.json"}, "whole numbers"),
        (MIXTRAL, {"zipf": 0.0, "placement": "other.json"}, "is no map of experts"),
        (MIXTRAL, {"zipf": 0.0, "placement": "gone.json"}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_said(
    catalog: Catalog, tmp_path: Path, model: str, said: dict[str, Any], message: str
) -> None:
    for name, shape in (("plain", (3, 8)), ("wide", (3, 16)), ("deep", (40, 8))):
        np.savez(tmp_path / f"{name}.npz", load=np.ones(shape))
    maps: dict[str, Any] = {
        "map": [list(range(8))] * 2,
        "lacks": [[0, 1, 2, 3, 4, 5, 6, 6]],
        "wild": [[*range(7), 8]],
        "ragged": [list(range(8)), list(range(9))],
        "text": [["a"] * 8],
    }
    for name, rows in maps.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"physical_to_logical_map": rows}))
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SpecError, match=message):
        read(catalog, tmp_path, model, **said)


def test_a_map_fits_degrees_that_divide_its_slots(catalog: Catalog, tmp_path: Path) -> None:
    slots = [[*range(8), 0, 1, 2, 3]] * 32
    found = read(catalog, tmp_path, MIXTRAL, zipf=1.0, placement=write_map(tmp_path, slots))
    assert found is not None
    assert found.num_copies == 4
    assert found.misfit(Layout(attention_data_parallel=4, expert_parallel=4)) is None
    assert "12 slots" in str(found.misfit(Layout(attention_data_parallel=8, expert_parallel=8)))
    assert found.misfit(Layout(tensor_parallel=8, expert_tensor_parallel=8)) is None


def test_a_map_that_fits_no_layout_is_the_constraint_that_binds(catalog: Catalog, tmp_path: Path) -> None:
    question = {
        "kind": "serving",
        "model": MIXTRAL,
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 512, "output_length": 16, "concurrency": 8},
        "experts": {"zipf": 1.0, "placement": write_map(tmp_path, [[*range(8), 0, 1, 2, 3]] * 32)},
        "fixed": {"mode": "aggregated", "tensor_parallel": 1, "attention_data_parallel": 8, "expert_parallel": 8},
    }
    made = plan(Question(document=question, catalog=catalog, base=tmp_path))
    assert made.solution["status"] == "infeasible"
    assert "12 slots of experts" in made.solution["binding_constraint"]
