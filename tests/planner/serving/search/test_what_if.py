"""Shapes that no engine runs: bounds, their labels, and when they say nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.what_if import WhatIf, what_if


def problem(catalog: Catalog, **changes: Any) -> ServingProblem:
    spec = {
        "kind": "serving",
        "model": "deepseek-v3",
        "cluster": {"nodes": [{"type": "dgx-h200", "count": 4}]},
        "workload": {"input_length": 4000, "output_length": 1000},
        "slo": {"tpot_p95_s": 0.05},
        **changes,
    }
    return resolve_serving(read_serving_spec(spec), catalog, Path()).problem


def shape(name: str, asked: ServingProblem) -> WhatIf | None:
    return next((one for one in what_if(asked) if name in one.name), None)


def test_disaggregated_attention_meets_the_slo_within_the_devices(catalog: Catalog) -> None:
    asked = problem(catalog)
    split = shape("attention and FFN", asked)
    assert split is not None
    assert split.tpot_s <= 0.05
    assert split.num_devices <= 32
    assert split.tokens_per_s_per_device == pytest.approx(split.num_running / split.tpot_s / split.num_devices)


def test_a_looser_slo_never_lowers_the_bound(catalog: Catalog) -> None:
    found = [shape("attention and FFN", problem(catalog, slo={"tpot_p95_s": limit})) for limit in (0.05, 0.1)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].tokens_per_s_per_device >= found[0].tokens_per_s_per_device


def test_split_attention_never_beats_its_two_resources(catalog: Catalog) -> None:
    """From data sheets alone: attention devices read every cached token, FFN devices multiply every active weight."""
    asked = problem(catalog, slo={"tpot_p95_s": 0.05})
    split = shape("attention and FFN", asked)
    assert split is not None
    num_attention = int(split.label.split(" attention")[0])
    num_ffn = int(split.label.split("FFN")[0].split(", ")[1])
    device, model = asked.machines["dgx-h200"].device, asked.shape
    assert model.latent is not None
    assert model.moe is not None
    cached = 61 * (model.latent.kv_lora_rank + model.latent.qk_rope_head_dim) * 2.0  # bytes of a token, 16 bits
    context = 4000 + 1000 / 2
    tokens_per_s = split.tokens_per_s_per_device * split.num_devices
    assert tokens_per_s * context * cached <= num_attention * device.memory_bandwidth_bytes_per_s
    active = model.num_moe_layers * model.moe.num_experts_per_token * model.expert_parameters
    assert tokens_per_s * 2.0 * active <= num_ffn * device.peak_flops_per_s["fp8"]


def test_links_never_help_by_being_slower_and_fast_ones_leave_compute_alone(catalog: Catalog) -> None:
    rates = []
    for bandwidth in ("10 GB/s", "50 GB/s", "100000 GB/s", "200000 GB/s"):
        links = {"inter_node": {"bandwidth": bandwidth, "latency": "0 us" if "00000" in bandwidth else "5 us"}}
        cluster = {"nodes": [{"type": "dgx-h200", "count": 4}], "links": links}
        split = shape("attention and FFN", problem(catalog, cluster=cluster))
        assert split is not None
        rates.append(split.tokens_per_s_per_device)
    assert rates == sorted(rates)
    assert rates[2] == pytest.approx(rates[3])  # the ideal: no exchange


def test_tokens_for_a_dollar_choose_the_shape_where_they_are_the_objective(catalog: Catalog) -> None:
    nodes = [{"type": "dgx-h200", "count": 2}, {"type": "dgx-h100", "count": 2}]
    asked = {"cluster": {"nodes": nodes}}
    by_device = shape("attention and FFN", problem(catalog, **asked))
    by_dollar = shape("attention and FFN", problem(catalog, **asked, objective="usd_per_million_tokens"))
    assert by_device is not None
    assert by_dollar is not None
    assert by_device.usd_per_million_tokens is not None
    assert by_dollar.usd_per_million_tokens is not None
    assert by_dollar.usd_per_million_tokens <= by_device.usd_per_million_tokens
    assert by_dollar.tokens_per_s_per_device <= by_device.tokens_per_s_per_device


def test_an_slo_that_no_shape_meets_leaves_none(catalog: Catalog) -> None:
    assert what_if(problem(catalog, slo={"tpot_p95_s": 1e-4})) == []


def test_answers_of_one_token_leave_none(catalog: Catalog) -> None:
    """All shapes are ways to decode, and the only token comes out of prefill."""
    assert what_if(problem(catalog, workload={"input_length": 4000, "output_length": 1}, slo={"ttft_p99_s": 9})) == []


def test_experts_move_to_host_memory_only_where_they_must(catalog: Catalog) -> None:
    small = {"nodes": [{"type": "dgx-h100", "count": 1}]}
    tight = shape("host memory", problem(catalog, cluster=small, slo={}))
    roomy = shape("host memory", problem(catalog, cluster={"nodes": [{"type": "dgx-h200", "count": 1}]}, slo={}))
    assert tight is not None
    assert "of the experts on devices" in tight.label
    assert roomy is None


def test_a_dense_model_has_no_experts_to_move(catalog: Catalog) -> None:
    assert shape("host memory", problem(catalog, model="llama-3.1-70b")) is None
