"""Plans with weights on the host: what fits, what is never better, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.serving.estimator.memory import weights_bytes
from meshplan.planner.serving.estimator.pools import pool_memory, pool_worker
from meshplan.planner.serving.problem.config import Role, serving_config_document, serving_config_from_document
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.weight_tiers import KERNEL_NAMES, Way
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.layouts import PlacedWorker, placed_workers
from meshplan.planner.serving.search.workers import pool_of
from meshplan.planner.serving.tiers.kernels import KERNELS

HOST = {"host_memory": "512 GB", "host_processor": "xeon-gold-6454s"}


def cluster(device: str, per_node: int, **host: Any) -> dict[str, Any]:
    links = {"intra_node": {"bandwidth": "25 GB/s", "latency": "10 us"}}
    return {"devices": {"type": device, "per_node": per_node, "nodes": 1}, "links": links, **(host or HOST)}


def question(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "serving",
        "model": "deepseek-v3",
        "cluster": cluster("rtx-4090", 1),
        "workload": {"input_length": 1000, "output_length": 100, "concurrency": 1, "num_requests": 8},
        "quantization": ["w4a16"],
        **changes,
    }


def problem_of(catalog: Catalog, **changes: Any) -> ServingProblem:
    return resolve_serving(read_serving_spec(question(**changes)), catalog, Path()).problem


def placed(problem: ServingProblem) -> list[PlacedWorker]:
    return list(placed_workers(problem, Role.MIXED, Counter()))


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return make_plan(question(), catalog)


def test_an_encoder_in_front_takes_its_room_beside_weights_on_the_host(catalog: Catalog) -> None:
    """What the search places is what the plan's pools hold, images included."""
    workload = {**question()["workload"], "images": {"width": 640, "height": 480}}
    problem = problem_of(catalog, model="qwen3-vl-30b-a3b", workload=workload, quantization=["bf16"])
    one = placed(problem)[0]
    whole = pool_memory(problem.site, pool_of(problem, one, 1), problem.workload)
    assert one.weight_tiers is not None
    assert one.memory.weights_bytes == pytest.approx(whole.weights_bytes)


def test_671_billion_parameters_on_one_small_device(plan: Plan) -> None:
    config = serving_config_from_document(plan.config)
    tiers = config.pools[0].weight_tiers
    assert config.engine == "sglang"  # the spec names none: others would stream every expert
    assert tiers is not None
    assert (tiers.way, tiers.kernel, tiers.threads) == (Way.EXPERTS_ON_HOST, "AMXINT4", 32)
    assert 8.73 <= 1.0 / plan.predicted["tpot_mean_s"].value <= 16.8  # published, one to two sockets of this host
    assert any("host memory" in doubt for doubt in plan.provenance["not_validated"])
    assert serving_config_document(config) == plan.config


@pytest.mark.parametrize(("device", "engine"), [("rtx-5090", "vllm"), ("rtx-4090", "sglang")])
def test_the_order_of_formats_decides_nothing_and_a_pin_never_improves(
    device: str, engine: str, catalog: Catalog
) -> None:
    """Mixtral in four bits fits one of the devices whole; in eight bits its experts would lie on the host.

    The other has 24 GB, of which an engine takes too little for four bits: its experts lie on the host in any format.
    """

    def best(*formats: str) -> Plan:
        asked = {"model": "mixtral-8x7b", "cluster": cluster(device, 1), "quantization": list(formats)}
        return make_plan(question(**asked), catalog)

    free, turned = best("fp8", "w4a16"), best("w4a16", "fp8")
    assert free.config == turned.config
    assert free.config["engine"] == engine
    for one in ("fp8", "w4a16"):
        assert best(one).solution["objective"] >= free.solution["bound"] * (1.0 - 1e-9), one


def test_devices_and_host_hold_all_weights(catalog: Catalog) -> None:
    problem = problem_of(catalog, model="qwen3-235b-a22b", cluster=cluster("rtx-4090", 4))
    for one in placed(problem):
        assert one.weight_tiers is not None
        pool = pool_of(problem, one, 1)
        memory = pool_memory(problem.site, pool, problem.workload)
        devices = one.layout.num_devices
        whole = weights_bytes(problem.shape, one.quantization, one.layout) * devices
        assert memory.weights_bytes * devices + one.weight_tiers.host_bytes == pytest.approx(whole)
        assert memory.weights_bytes + memory.workspace_bytes < memory.budget_bytes
        assert one.weight_tiers.host_bytes < 512e9


def test_an_expert_more_on_devices_never_slows_an_iteration(catalog: Catalog) -> None:
    problem = problem_of(catalog, model="qwen3-235b-a22b", cluster=cluster("rtx-4090", 4))
    one, tokens = placed(problem)[0], np.array([1.0, 4.0, 64.0, 2048.0])
    assert one.weight_tiers is not None
    before = np.full_like(tokens, np.inf)
    for number in range(0, 128, 16):
        tiers = replace(one.weight_tiers, device_experts=number)
        worker = pool_worker(problem.site, replace(pool_of(problem, one, 1), weight_tiers=tiers), problem.workload)
        now = worker.routed_s(tokens)
        assert np.all(now <= before * (1.0 + 1e-9))
        before = now


def test_more_bandwidth_is_never_slower_and_a_pin_never_better(catalog: Catalog, plan: Plan) -> None:
    best = plan.predicted["output_tokens_per_s"].value
    faster = cluster("rtx-4090", 1, **HOST, host_memory_bandwidth="614 GB/s")
    assert make_plan(question(cluster=faster), catalog).predicted["output_tokens_per_s"].value > best
    chosen = plan.config["pools"][0]["weight_tiers"]["device_experts"]
    pinned = make_plan(question(fixed={"device_experts": chosen - 2}), catalog)
    assert pinned.config["pools"][0]["weight_tiers"]["device_experts"] == chosen - 2
    assert pinned.predicted["output_tokens_per_s"].value <= best * (1.0 + 1e-9)


def test_recorded_popularity_keeps_the_popular(catalog: Catalog, plan: Plan) -> None:
    skewed = make_plan(question(experts={"zipf": 0.5}), catalog)
    assert skewed.config["pools"][0]["weight_tiers"]["by_popularity"]
    assert skewed.predicted["output_tokens_per_s"].value > plan.predicted["output_tokens_per_s"].value


def test_a_dense_model_is_streamed_and_the_least_that_is_needed(catalog: Catalog) -> None:
    slow = {"input_length": 1000, "output_length": 100, "concurrency": 2, "num_requests": 8}
    found = make_plan(
        question(
            model="llama-3.1-70b",
            cluster=cluster("t4", 8, host_memory="256 GB"),
            workload=slow,
            quantization=["bf16"],
        ),
        catalog,
    )
    pool = found.config["pools"][0]
    assert found.config["engine"] == "vllm"
    assert pool["weight_tiers"]["way"] == "streamed"
    assert pool["layout"]["tensor_parallel"] == 8
    memory = found.memory["pools"][0]
    assert memory["weights_bytes"] < memory["budget_bytes"] < memory["weights_bytes"] + 4.5 * 2**30
    assert any("an assumption" in doubt for doubt in found.provenance["not_validated"])


def test_a_question_that_fits_keeps_its_weights(catalog: Catalog) -> None:
    fits = question(model="llama-3.1-8b", quantization=["bf16"])
    assert "weight_tiers" not in make_plan(fits, catalog).config["pools"][0]
    assert problem_of(catalog, cluster={"nodes": [{"type": "dgx-h100", "count": 1}]}).tiering is None


def test_refusals_name_the_numbers(catalog: Catalog) -> None:
    small = make_plan(question(cluster=cluster("rtx-4090", 1, host_memory="128 GB")), catalog)
    assert small.solution["status"] == "infeasible"
    assert any("usable memory, 95.4 GiB" in row["reason"] for row in small.rejected)
    old = make_plan(question(cluster=cluster("t4", 1), constraints={"target": "sglang"}), catalog)
    assert any("compute capability 8.0" in row["reason"] for row in old.rejected)
    for changes, words in (
        ({"cluster": cluster("rtx-4090", 1, host_memory="512 GB", host_processor="6502")}, "6502"),
        ({"cluster": {**cluster("rtx-4090", 1), "host_memory": None}}, "host_memory"),
        ({"fixed": {"device_experts": 4}, "constraints": {"target": "vllm"}}, "target sglang"),
        ({"model": "llama-3.1-70b", "fixed": {"device_experts": 4}, "constraints": {"target": "sglang"}}, "dense"),
    ):
        with pytest.raises(SpecError, match=words):
            make_plan(question(**changes), catalog)


def test_one_host_serves_one_worker(catalog: Catalog) -> None:
    problem = problem_of(catalog, model="qwen3-235b-a22b", cluster=cluster("rtx-4090", 4))
    assert {one.most_workers for one in placed(problem)} == {1}
    many = {"input_length": 1000, "output_length": 100, "concurrency": 4, "num_requests": 8}
    chosen = make_plan(
        question(model="qwen3-235b-a22b", cluster=cluster("rtx-4090", 4), workload=many), catalog
    ).config["pools"]
    assert sum(pool["num_workers"] for pool in chosen) == 1


def test_a_pinned_split_is_estimated(catalog: Catalog) -> None:
    pinned = question(fixed={"device_experts": 2, "tensor_parallel": 1})
    estimated = estimate_plan(pinned, catalog)
    assert estimated.config["pools"][0]["weight_tiers"]["device_experts"] == 2


def test_every_kernel_may_be_stored() -> None:
    assert set(KERNELS) == set(KERNEL_NAMES)


def test_too_wide_weights_name_the_host_and_the_format_that_fits(catalog: Catalog) -> None:
    wide = make_plan(question(quantization=["fp8_block"]), catalog)
    assert "usable memory, 381.5 GiB" in wide.solution["binding_constraint"]
    assert [row["change"] for row in wide.solution["least_change"]] == ["quantization: [w4a16]"]


def test_one_device_with_its_host_stands_for_two_that_hold_all(catalog: Catalog) -> None:
    """Weights on the host were looked at only where nothing fits the devices: two devices were proven the fewest."""
    asked = question(
        model="llama-3.1-70b",
        cluster=cluster("rtx-3090", 2),
        workload={"input_length": 500, "output_length": 50, "concurrency": 1, "num_requests": 8},
        quantization=["w4a16"],
        objective="num_devices",
        slo={"tpot_p50_s": 1.0},
    )
    made = make_plan(asked, catalog)
    pinned = make_plan({**asked, "fixed": {"tensor_parallel": 1, "pipeline_parallel": 1}}, catalog)
    assert made.solution["objective"] == pinned.solution["objective"] == 1
    assert made.config["pools"][0]["weight_tiers"]["way"] == Way.STREAMED.value
