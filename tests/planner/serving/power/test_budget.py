"""Copies of a deployment under a power budget: watts of simulated windows, counts, and the price of the safety net."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.constants.machines.device_shares import MpsShare
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.cluster.power import DeviceWork, peak_bytes_per_j, power_share
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.power.budget import PowerBudget, under_budget
from meshplan.planner.serving.power.copies import PowerHistogram, exceedance
from meshplan.planner.serving.power.draw import draw_over_time, segment_work, work_by_window
from meshplan.planner.serving.problem.config import ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.weight_tiers import FfnDevices
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.deployment import serve
from meshplan.planner.serving.search.search import estimate_pinned
from meshplan.planner.serving.simulation.metrics import latency, samples_of
from meshplan.planner.serving.simulation.run import ServingRun

RATE = 2.0
SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"input_length": 2000, "output_length": 200, "request_rate_per_s": RATE},
    "slo": {"ttft_p99_s": 1.0},
    "fixed": {"mode": "aggregated", "tensor_parallel": 2, "num_workers": 2, "max_num_seqs": 64},
}


def problem_of(catalog: Catalog, **changes: Any) -> ServingProblem:
    return resolve_serving(read_serving_spec({**SPEC, **changes}), catalog, Path()).problem


@pytest.fixture(scope="module")
def problem(catalog: Catalog) -> ServingProblem:
    return problem_of(catalog)


@pytest.fixture(scope="module")
def config(problem: ServingProblem) -> ServingConfig:
    return estimate_pinned(problem)[0].candidate.config


def answer(problem: ServingProblem, config: ServingConfig, budget_w: float, **more: Any) -> dict[str, Any]:
    return under_budget(problem, config, PowerBudget(budget_w=budget_w, **more), requests_per_s=RATE, num_hosts=1)


def simulated(problem: ServingProblem, config: ServingConfig, seed: int, num_requests: int) -> ServingRun:
    return serve(problem.site, config, replace(problem.workload, num_requests=num_requests), seed=seed)


def test_windows_add_up_to_the_work_of_the_run(problem: ServingProblem, config: ServingConfig) -> None:
    worker = pool_worker(problem.site, config.pools[0], problem.workload)
    segments = simulated(problem, config, 0, 300).workers[0].segments
    whole = segment_work(worker, segments).sum()
    edges = np.arange(0.0, float(segments.end_s.max()) + 2.0)
    by_window = work_by_window(worker, segments, edges)
    for name in DeviceWork.__dataclass_fields__:
        assert getattr(by_window, name).sum() == pytest.approx(float(getattr(whole, name)), rel=1e-9), name
        assert (getattr(by_window, name) >= 0.0).all()


def test_a_window_draws_what_the_curve_says_of_its_mean(problem: ServingProblem, config: ServingConfig) -> None:
    """Before the first request boards wait; in each window each worker's boards draw the curve's watts of its work."""
    run, device = simulated(problem, config, 0, 300), problem.machines["dgx-h100"].device
    assert device.tdp_w is not None
    draw = draw_over_time(problem, config, run, start_s=-10.0, end_s=90.0)
    assert len(draw.expected_w) == 100
    nothing = DeviceWork(**dict.fromkeys(DeviceWork.__dataclass_fields__, np.zeros(())))
    constants, per_j = problem.power.constants, peak_bytes_per_j(device)
    waiting_w = config.num_devices * device.tdp_w * float(power_share(constants, nothing, per_j))
    assert draw.expected_w[:9] == pytest.approx(waiting_w)
    worker, edges = pool_worker(problem.site, config.pools[0], problem.workload), np.array([30.0, 31.0])
    shares = [power_share(constants, work_by_window(worker, one.segments, edges), per_j)[0] for one in run.workers]
    assert draw.expected_w[40] == pytest.approx(2 * device.tdp_w * sum(shares))
    factor = math.exp(problem.power.error_p90["power"])
    assert draw.upper_w[0] == pytest.approx(factor * waiting_w)
    assert draw.upper_w.max() <= config.num_devices * device.tdp_w * (1.0 + 1e-9)
    assert (draw.upper_w >= draw.expected_w).all()


def test_simulated_copies_exceed_a_budget_as_often_as_the_convolution_says(
    problem: ServingProblem, config: ServingConfig
) -> None:
    """Six copies, each with requests of its own: the sum of their windows has the tail of the convolution."""
    windows = [
        draw_over_time(problem, config, simulated(problem, config, seed, 2300), start_s=100.0, end_s=1100.0).expected_w
        for seed in range(6)
    ]
    total_w = np.sum(windows, axis=0)
    one = PowerHistogram.of(np.concatenate(windows))
    for quantile in (0.3, 0.5, 0.7, 0.9):
        budget_w = float(np.quantile(total_w, quantile))
        assert exceedance(one, 6, budget_w) == pytest.approx(1.0 - quantile, abs=0.05)


def test_counts_and_the_safety_net(problem: ServingProblem, config: ServingConfig) -> None:
    found = answer(problem, config, 40_000.0)
    by = {row["by"]: row for row in found["copies"]}
    one = found["one_copy"]
    assert one["rated_w"] == 4 * 700.0
    assert one["num_windows"] >= 3500
    assert one["expected"]["mean_w"] <= one["expected"]["p99_w"] <= one["expected"]["peak_w"] <= one["rated_w"]
    assert by["rated power"]["copies"] == 14
    assert by["largest simulated power"]["copies"] == math.floor(40_000.0 / one["expected"]["peak_w"])
    counts = [row["copies"] for row in found["copies"]]
    assert counts[0] <= counts[1] <= counts[2]
    assert counts[0] <= counts[3] <= counts[2]
    assert by["risk, expected watts"]["exceedance"] <= 0.001 >= by["risk, upper end of watts"]["exceedance_upper"]
    for row in found["copies"]:
        assert row["oversubscription"] == pytest.approx(row["copies"] * one["rated_w"] / 40_000.0)
        assert (row["limits_w"] is None) is (row["oversubscription"] <= 1.0)
        if row["limits_w"]:
            (limit,) = row["limits_w"]
            assert row["copies"] * 4 * limit <= 40_000.0 < row["copies"] * 4 * (limit + 1.0)


def test_the_safety_net_is_the_deployment_with_that_limit(problem: ServingProblem, config: ServingConfig) -> None:
    """Its latencies are those of the same requests under boards with the limit, which alone slows them."""
    found = answer(problem, config, 40_000.0, risk=0.6)
    row = next(row for row in found["copies"] if row["by"] == "risk, expected watts")
    (limit,) = row["limits_w"]
    capped = replace(config, pools=tuple(replace(pool, power_cap_w=limit) for pool in config.pools))
    num = math.ceil(3600.0 * RATE / 0.9)
    run = simulated(problem, capped, 0, num)
    assert row["ttft_p99_s"] == latency(samples_of(run.after(math.ceil(0.1 * num)), "ttft")).p99
    assert row["ttft_p99_s"] > found["one_copy"]["ttft_p99_s"]
    assert row["slo_met"]
    tight = answer(replace(problem, slos=tuple(replace(slo, limit_s=1e-3) for slo in problem.slos)), config, 40_000.0)
    assert not tight["one_copy"]["slo_met"]
    assert "ttft_p99_s" in tight["one_copy"]["violated"][0]


def test_hosts_count_when_they_are_stated(problem: ServingProblem, config: ServingConfig) -> None:
    bare, hosted = answer(problem, config, 40_000.0), answer(problem, config, 40_000.0, host_w=2_000.0)
    assert hosted["one_copy"]["rated_w"] == bare["one_copy"]["rated_w"] + 2_000.0
    assert hosted["one_copy"]["expected"]["p50_w"] == bare["one_copy"]["expected"]["p50_w"] + 2_000.0
    assert all(few["copies"] < many["copies"] for few, many in zip(hosted["copies"], bare["copies"], strict=True))
    for row in hosted["copies"]:
        if row["limits_w"]:
            assert row["copies"] * (4 * row["limits_w"][0] + 2_000.0) <= 40_000.0
    assert len(bare["not_counted"]) == len(hosted["not_counted"]) + 1


def test_a_limit_below_half_of_the_boards_has_no_price(problem: ServingProblem, config: ServingConfig) -> None:
    """Next to nothing arrives, so that waiting boards fill the budget: a limit below their half was held to no run."""
    quiet = replace(problem, workload=replace(problem.workload, request_rate_per_s=0.001, num_requests=100))
    found = under_budget(quiet, config, PowerBudget(budget_w=40_000.0, risk=0.1), requests_per_s=0.001, num_hosts=1)
    row = next(row for row in found["copies"] if row["by"] == "risk, expected watts")
    assert row["limits_w"][0] < 350.0
    assert "350 W" in row["without_price"]
    assert "ttft_p99_s" not in row


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "no rate"),
        ({"arrival": "all_at_once", "num_requests": 100}, "a batch that ends"),
    ],
)
def test_a_load_without_a_rate_is_refused(
    changes: dict[str, Any], words: str, catalog: Catalog, config: ServingConfig
) -> None:
    workload = {"input_length": 2000, "output_length": 200, **changes}
    with pytest.raises(SpecError, match=words):
        answer(problem_of(catalog, workload=workload), config, 40_000.0)


def test_boards_without_a_known_limit_are_refused(problem: ServingProblem, config: ServingConfig) -> None:
    machine = problem.machines["dgx-h100"]
    unknown = replace(machine, device=replace(machine.device, tdp_w=None))
    with pytest.raises(SpecError, match=r"knows no power limit of h100\S*: state its tdp_w"):
        answer(replace(problem, machines={"dgx-h100": unknown}), config, 40_000.0)


def test_a_budget_below_one_copy_says_what_one_takes(problem: ServingProblem, config: ServingConfig) -> None:
    with pytest.raises(SpecError, match=r"1000 W are less than one copy takes: 2800 W rated, .* on average"):
        answer(problem, config, 1_000.0)


@pytest.mark.parametrize(
    ("budget_w", "risk"), [(0.0, 0.001), (math.inf, 0.001), (1e4, 0.0), (1e4, 1.0), (1e4, math.nan)]
)
def test_a_budget_that_says_nothing_is_refused(budget_w: float, risk: float) -> None:
    with pytest.raises(SpecError, match="power"):
        PowerBudget(budget_w=budget_w, risk=risk)


def test_a_trace_of_a_minute_is_too_short(problem: ServingProblem, config: ServingConfig) -> None:
    from meshplan.planner.serving.problem.requests import Arrival
    from meshplan.planner.serving.simulation.arrivals import make_requests

    trace = make_requests(replace(problem.workload, num_requests=120), seed=0)
    short = replace(problem.workload, arrival=Arrival.TRACE, request_rate_per_s=None, trace=trace)
    with pytest.raises(SpecError, match="fewer than the 100 windows of 1 s"):
        answer(replace(problem, workload=short), config, 40_000.0)


def test_vectors_have_no_time_per_token(catalog: Catalog) -> None:
    vectors = problem_of(
        catalog,
        model="bge-m3",
        workload={"task": "embed", "input_length": 500, "request_rate_per_s": RATE},
        slo={"e2e_p99_s": 1.0},
        fixed={},
    )
    found = answer(vectors, estimate_pinned(vectors)[0].candidate.config, 40_000.0)
    assert found["one_copy"]["tpot_p95_s"] is None
    assert found["one_copy"]["ttft_p99_s"] > 0.0


@pytest.mark.parametrize(
    "part", [{"share": MpsShare.of(80e9, 2)}, {"ffn": FfnDevices(node_type="dgx-h100", num_devices=2, micro_batches=2)}]
)
def test_parts_of_devices_and_layers_are_refused(
    part: dict[str, Any], problem: ServingProblem, config: ServingConfig
) -> None:
    parted = replace(config, pools=tuple(replace(pool, **part) for pool in config.pools))
    with pytest.raises(SpecError, match="shares devices"):
        answer(problem, parted, 40_000.0)
