"""llama.cpp's layers on the host: times against a sum layer by layer, memory against a deal, and what may never be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_questions import question

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.service import make_plan
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.memory import worker_memory
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import SCHEMES
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.weight_tiers import Way, WeightTiers
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.tiers.layers import layered_memory, slot_layers

LLAMA = {"constraints": {"target": "llama.cpp"}}
CASES = [("deepseek-v3", "rtx-4090", 1), ("qwen3-235b-a22b", "rtx-4090", 4), ("llama-3.1-70b", "t4", 8)]


def problem_of(
    catalog: Catalog, model: str, device: str = "rtx-4090", per_node: int = 1, **host: Any
) -> ServingProblem:
    asked = question(model, device, per_node, "q4_k_m", **LLAMA)
    asked["cluster"] |= host
    return resolve_serving(read_serving_spec(asked), catalog, Path()).problem


def pool_of(problem: ServingProblem, host_layers: int, stages: int = 1) -> Pool:
    (node_type,) = problem.machines
    return Pool(
        role=Role.MIXED,
        layout=Layout(pipeline_parallel=stages),
        num_workers=1,
        limits=replace(problem.rules.default_limits(problem.machines[node_type].device), max_num_seqs=64),
        quantization=problem.quantizations[0],
        node_type=node_type,
        weight_tiers=WeightTiers(way=Way.LAYERS_ON_HOST, host_bytes=0.0, host_layers=host_layers),
    )


def worker(problem: ServingProblem, host_layers: int) -> Worker:
    return pool_worker(problem.site, pool_of(problem, host_layers), problem.workload)


@pytest.mark.parametrize("tokens", [1, 8, 31])
def test_experts_of_host_layers_are_read_once_where_they_are_hit(catalog: Catalog, tokens: int) -> None:
    """Summed layer by layer by the module's equation, with the experts that T draws hit counted by simulation."""
    problem = problem_of(catalog, "deepseek-v3")
    none, some = worker(problem, 0), worker(problem, 20)
    moe, draw = problem.shape.moe, np.random.default_rng(5)
    assert moe is not None
    chosen = [draw.permuted(np.tile(np.arange(256), (tokens, 1)), axis=1)[:, :8] for _ in range(400)]
    hit = np.mean([len(np.unique(one)) for one in chosen])
    read = hit * SCHEMES["q4_k_m"].weight_bytes * problem.shape.expert_parameters / (0.42 * 307.2e9)
    rows = 2.0 * 2.0 * tokens * 7168 / (0.75 * 31e9)
    one = np.array([float(tokens)])
    factor = float(none.scale(one)[0])
    device = factor * float(none.routed_s(one)[0])
    mixed = factor * float(some.routed_s(one)[0])
    assert 58 * mixed == pytest.approx(38 * device + 20 * (57e-6 + rows + read), rel=0.02)


def test_layers_of_a_dense_model_are_read_where_they_lie(catalog: Catalog) -> None:
    """80 layers of 855.6 million weights (Llama-3.1-70B without its ends, 68.45 billion), of which 30 on the host."""
    problem = problem_of(catalog, "llama-3.1-70b")
    one = np.array([1.0])
    none, some = worker(problem, 0), worker(problem, 30)
    factor = float(none.scale(one)[0])
    device, mixed = (factor * float(sum(w.dense_parts_s(one).values())[0]) for w in (none, some))
    read = 30 * 68.45e9 / 80 * 4.8944 / 8 / (0.42 * 307.2e9)
    assert mixed == pytest.approx(50 / 80 * device + read + 57e-6, rel=0.01)
    attention = some.decode_attention_s(one, np.array([8000.0]))[0]
    cached = 30 / 80 * 8000 * 327_680 / (0.42 * 307.2e9) / some.constants.decode_factor
    assert attention == pytest.approx(50 / 80 * none.decode_attention_s(one, np.array([8000.0]))[0] + cached, rel=0.01)


@pytest.mark.parametrize("model", ["deepseek-v3", "llama-3.1-70b"])
def test_a_layer_more_on_the_host_is_never_faster_nor_is_a_slower_host(catalog: Catalog, model: str) -> None:
    problem = problem_of(catalog, model)
    slower = problem_of(catalog, model, host_memory_bandwidth="100 GB/s", host_sockets=1)
    before = np.zeros(4)
    for number in (0, 1, 7, slot_layers(problem.shape)):
        costs = [worker(one, number).step_cost() for one in (problem, slower)]
        loads = [(0, 0.0, 1, 500, 1e5), (1, 900.0, 0, 0, 0.0), (20, 9e3, 0, 0, 0.0), (50, 9e4, 1, 300, 1e5)]
        here, there = (np.array([cost.step_s(*load) for load in loads]) for cost in costs)
        assert np.all(there >= here * (1 - 1e-12))
        assert np.all(here >= before)
        before = here


@pytest.mark.parametrize(("model", "device", "stages"), CASES)
def test_memory_is_that_of_the_fullest_of_the_stages(catalog: Catalog, model: str, device: str, stages: int) -> None:
    problem = problem_of(catalog, model, device, stages)
    shape, (machine,) = problem.shape, problem.machines.values()
    slots = slot_layers(shape)
    for number in (1, slots // 3, slots - 1):
        pool = pool_of(problem, number, stages)
        whole = worker_memory(shape, machine.device, pool.layout, pool.limits, pool.quantization, context=550.0)
        less = layered_memory(whole, shape, pool)
        dealt = np.bincount(np.arange(slots - number) % stages, minlength=stages).max()
        each = shape.num_moe_layers and shape.moe.num_experts * shape.expert_parameters * 4.8944 / 8
        if each:
            rest = whole.weights_bytes - slots / stages * each
            kept = min(dealt + (stages > 1), -(-slots // stages))  # spread layers miss the stages' ends by one
            assert less.weights_bytes - rest == pytest.approx(each * kept, rel=1e-6)
        else:
            assert less.weights_bytes <= whole.weights_bytes
            assert less.kv_bytes_per_token == pytest.approx(whole.kv_bytes_per_token * dealt * stages / slots)


def test_what_fits_the_devices_lies_there(catalog: Catalog) -> None:
    found = make_plan(question("llama-3.1-8b", "rtx-4090", 1, "q4_k_m", **LLAMA), catalog)
    assert found.config["pools"][0].get("weight_tiers") is None


@pytest.mark.parametrize(("model", "device", "per_node"), [*CASES[:2], ("llama-3.1-70b", "rtx-4090", 1)])
def test_the_search_finds_the_best_of_all_numbers_of_layers(
    catalog: Catalog, model: str, device: str, per_node: int
) -> None:
    """Every number of layers priced by itself, fitting or not by its memory: none beats the plan's time per token."""
    asked = question(model, device, per_node, "q4_k_m", objective="max_request_rate", **LLAMA)
    plan = make_plan(asked, catalog)
    problem = problem_of(catalog, model, device, per_node)
    (machine,) = problem.machines.values()
    best = np.inf
    for stages in range(1, per_node + 1):
        for number in range(slot_layers(problem.shape) + 1):
            pool = pool_of(problem, number, stages)
            pool = replace(pool, limits=problem.rules.default_limits(machine.device))
            whole = worker_memory(
                problem.shape, machine.device, pool.layout, pool.limits, pool.quantization, context=550.0
            )
            memory = layered_memory(whole, problem.shape, pool) if number else whole
            if memory.kv_capacity_tokens < 550:
                continue
            pool = replace(pool, limits=replace(pool.limits, max_num_seqs=1))
            cost = pool_worker(problem.site, pool, problem.workload).step_cost()
            best = min(best, cost.decode_s(1) + cost.decode_context_s[1] * 525)
    assert plan.solution["status"] == "optimal"
    assert plan.predicted["tpot_mean_s"].value == pytest.approx(best, rel=0.01)
