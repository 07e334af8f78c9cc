"""Published routing on serving plans over two nodes: what placing experts by it does to the times of a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.expert_placement.problem.recordings import ExpertRecording
from meshplan.planner.serving.expert_plan import place_served_experts
from meshplan.planner.serving.problem.expert_routing import Dispatch
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.service import plan

DATA = Path(__file__).parents[2] / "data"
LINKS = {
    "intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"},
    "inter_node": {"bandwidth": "100 Gb/s", "latency": "5 us"},
}


def planned(
    catalog: Catalog, model: str, devices: int, *, loaded: int = 8, **fixed: Any
) -> tuple[Plan, ServingProblem]:
    """Attention data parallel and experts over all devices of two nodes, ``loaded`` requests in flight a device."""
    document = {
        "kind": "serving",
        "model": model,
        "cluster": {"devices": {"type": "h100-sxm-80gb", "per_node": devices // 2, "nodes": 2}, "links": LINKS},
        "workload": {"input_length": 1024, "output_length": 64, "concurrency": loaded * devices, "num_requests": 256},
        "fixed": {
            "mode": "aggregated",
            "tensor_parallel": 1,
            "attention_data_parallel": devices,
            "expert_parallel": devices,
            "num_workers": 1,
            **fixed,
        },
    }
    made = plan(Question(document=document, catalog=catalog, top=1))
    return made, resolve_serving(read_serving_spec(document), catalog, Path()).problem


def published(name: str, domain: str = "c4") -> ExpertRecording:
    document = json.loads((DATA / f"{name}_expert_counts.json").read_text())
    ways = document.get("transitions")
    return ExpertRecording(
        load=np.array([document[domain]], dtype=float),
        layer_ids=(0, 7, 15),
        transitions=None if ways is None else np.array(ways, dtype=float),
    )


def test_published_loads_placed_make_every_time_shorter(catalog: Catalog) -> None:
    """At loads where the engines decide; with eight requests a device OLMoE's wait for the API server."""
    for model, name, devices in (("olmoe-1b-7b", "olmoe", 16), ("mixtral-8x7b", "mixtral", 4)):
        made, problem = planned(catalog, model, devices, loaded=4)
        document = place_served_experts(made, problem, {"c4": published(name)}).document
        current, new = document["served"]["current"], document["served"]["new"]
        assert new["load_factor"] < current["load_factor"]
        assert current["load_factor"] == pytest.approx(_fullest(published(name).load[0], devices), rel=1e-12)
        for metric in ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "e2e_mean_s"):
            assert new[metric] < current[metric]


def _fullest(load: np.ndarray, devices: int) -> float:
    """Load of the fullest device over the mean with the experts in order, mean over layers."""
    each = load.reshape(len(load), devices, -1).sum(axis=2)
    return float((each.max(axis=1) / each.mean(axis=1)).mean())


def test_fewer_changes_of_device_count_where_tokens_stay_and_nowhere_else(catalog: Catalog) -> None:
    """Even loads, and tokens that stay in pairs of experts which each layer numbers in its own way."""
    draw = np.random.default_rng(1)
    pair = np.array([draw.permutation(8) // 2 for _ in range(32)])
    ways = np.where(pair[:-1, :, None] == pair[1:, None, :], 40.0, 1.0)
    recording = ExpertRecording(load=np.full((1, 32, 8), 86.0), layer_ids=tuple(range(32)), transitions=ways)
    made, problem = planned(catalog, "mixtral-8x7b", 4)
    asked: dict[str, Any] = {"objective": "balance+affinity", "min_balancedness": 0.9}
    for dispatch in Dispatch:
        document = place_served_experts(made, problem, {"c4": recording}, dispatch=dispatch, **asked).document
        current, new = document["served"]["current"], document["served"]["new"]
        assert document["new"]["cross_device_fraction"] < document["today"]["cross_device_fraction"]
        if dispatch is Dispatch.STAYS:
            assert new["ttft_mean_s"] < current["ttft_mean_s"]
            assert new["hops"]["other_node"] < current["hops"]["other_node"]
        else:
            assert new["ttft_mean_s"] == pytest.approx(current["ttft_mean_s"], rel=1e-9)


def test_a_placement_that_would_be_slower_is_not_the_answer(catalog: Catalog) -> None:
    """A second copy of every expert doubles the weights that a decode iteration reads, and even loads need none."""
    made, problem = planned(catalog, "mixtral-8x7b", 4)
    recording = ExpertRecording(load=np.full((1, 32, 8), 86.0), layer_ids=tuple(range(32)))
    placed = place_served_experts(made, problem, {"c4": recording}, num_redundant_experts=8)
    assert placed.placement.tolist() == [list(range(8))] * 32
    assert placed.document["served"]["new"] == placed.document["served"]["current"]
    assert placed.document["replacement"]["moved_experts"] == 0
    assert "the current one is faster" in placed.solution.solver


def test_pools_that_spread_experts_differently_are_refused(catalog: Catalog) -> None:
    alone = {"tensor_parallel": 1, "num_workers": 1}
    document = {
        "kind": "serving",
        "model": "olmoe-1b-7b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 512, "output_length": 64, "concurrency": 16, "num_requests": 64},
        "fixed": {
            "mode": "disaggregated",
            "prefill": {**alone, "attention_data_parallel": 2, "expert_parallel": 2},
            "decode": {**alone, "attention_data_parallel": 4, "expert_parallel": 4},
        },
    }
    made = plan(Question(document=document, catalog=catalog, top=1))
    problem = resolve_serving(read_serving_spec(document), catalog, Path()).problem
    with pytest.raises(SpecError, match="over 2 and 4 devices"):
        place_served_experts(made, problem, {"c4": published("olmoe")})
