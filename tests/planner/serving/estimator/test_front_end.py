"""A server's front end: no more tokens reach clients than it hands on, whatever the devices compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.constants.serving_benchmarks import BenchmarkRun, started_as
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.estimator.breakdown import iteration_parts
from meshplan.planner.serving.estimator.front_end import MESSAGE_S, REQUEST_S
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.simulation.engine import simulate

EACH_S = MESSAGE_S + REQUEST_S / 199.0  # answers of 200 tokens
ANSWER, PROMPT = 200, 220


def asked(catalog: Catalog, *, ranks: int = 1, **workload: Any) -> tuple[ServingProblem, Pool]:
    """Llama-3.2-1B, of which an A100 computes more tokens than one process hands on."""
    said = {"input_length": PROMPT, "output_length": ANSWER, "concurrency": 512, **workload}
    cluster = {"nodes": [{"type": "dgx-a100-80gb", "count": 1}]}
    spec = {"kind": "serving", "model": "llama-3.2-1b", "workload": said, "cluster": cluster}
    problem = resolve_serving(read_serving_spec(spec), catalog, Path()).problem
    pool = Pool(
        role=Role.MIXED,
        layout=Layout(attention_data_parallel=ranks),
        num_workers=1,
        limits=EngineLimits(max_num_seqs=512, max_batched_tokens=8192),
        quantization=Quantization.uniform("bf16"),
        node_type="dgx-a100-80gb",
    )
    return problem, pool


@pytest.fixture
def worker(catalog: Catalog) -> Worker:
    problem, pool = asked(catalog)
    return pool_worker(problem.site, pool, problem.workload)


@pytest.mark.parametrize("num_seqs", [1, 64, 512])
@pytest.mark.parametrize("grown", [1, ANSWER])
def test_decodes_take_about_the_longer_of_the_engine_and_its_front_end(
    worker: Worker, num_seqs: int, grown: int
) -> None:
    context = num_seqs * (PROMPT + grown - 1.0 + (grown == ANSWER))
    alone = replace(worker, front_ends=0).step_cost().step_s(num_seqs, context, 0, 0, 0.0)
    expected = (alone**4 + (num_seqs * EACH_S) ** 4) ** 0.25
    assert worker.step_cost().step_s(num_seqs, context, 0, 0, 0.0) == pytest.approx(expected)


@pytest.mark.parametrize("num_seqs", [16, 480])
@pytest.mark.parametrize("tokens", [300, 6000])
def test_it_works_beside_prompts_too_not_before_them(worker: Worker, num_seqs: int, tokens: int) -> None:
    """Of all that an iteration with prompts takes the front end hides as much as it can."""
    worker = replace(worker, graphed_tokens=8192, fixed_graphs=True)
    load = (num_seqs, num_seqs * float(PROMPT), -(-tokens // PROMPT), tokens, 110.0 * tokens)
    alone = replace(worker, front_ends=0).step_cost().step_s(*load)
    expected = (alone**4 + (num_seqs * EACH_S) ** 4) ** 0.25
    assert worker.step_cost().step_s(*load) == pytest.approx(expected, rel=1e-6)


def test_a_closed_loop_yields_no_more_than_one_process_hands_on(worker: Worker) -> None:
    num = 1500
    requests = Requests(
        arrival_s=np.zeros(num),
        input_length=np.full(num, PROMPT),
        output_length=np.full(num, ANSWER),
        concurrency=512,
        cached_tokens=np.zeros(num, dtype=int),
    )
    rates = []
    for front_ends in (0, 2, 1):
        cost = replace(worker, front_ends=front_ends).step_cost()
        run = simulate(requests, cost, worker.limits, kv_capacity_tokens=2_000_000)
        rates.append(num / float(run.finish_s.max()))
    most = 1.0 / (199.0 * MESSAGE_S + REQUEST_S)
    assert rates[0] > 1.5 * most  # else there is nothing to see
    assert 0.7 * most < rates[2] <= most
    assert rates[2] < rates[1] <= 2.0 * most


def test_servers_that_published_their_rates_reach_them() -> None:
    """The two equations behind r and s, and a judge: MiniMax on vLLM 0.19 streams 21,109 tokens/s, 1,024 an answer."""
    of_vllm, of_sglang, of_long = (length * MESSAGE_S + REQUEST_S for length in (200.0, 530.0, 1024.0))
    assert of_vllm == pytest.approx(130.74 / 10_000, rel=0.02)
    assert of_sglang == pytest.approx(1.0 / 41.08, rel=0.02)
    assert 1024.0 / of_long > 21_109.0


def test_each_attention_rank_has_its_own_where_the_release_says_so(catalog: Catalog) -> None:
    problem, pool = asked(catalog, ranks=4)
    found = pool_worker(problem.site, pool, problem.workload)
    assert found.front_end_s == pytest.approx(EACH_S / 4.0)
    shared = replace(problem.site, recipe=replace(problem.site.recipe, front_end_per_rank=False))
    assert pool_worker(shared, pool, problem.workload).front_end_s == pytest.approx(EACH_S)


def test_a_benchmark_in_the_engines_own_process_has_none(catalog: Catalog) -> None:
    """TensorRT-LLM 0.14's published throughputs, up to 64,530 tokens/s on eight H100."""
    problem, pool = asked(catalog)
    scripted = replace(problem.site, recipe=replace(problem.site.recipe, has_api_server=False))
    assert pool_worker(scripted, pool, problem.workload).front_end_s == 0.0
    run = BenchmarkRun(
        title="TensorRT-LLM v0.14 perf-overview.md",
        device="h100-sxm-80gb",
        model="Mixtral 8x7B",
        precision="fp8",
        input_length=128.0,
        output_length=2048.0,
        concurrency=0,
        tensor_parallel=8,
        attention_data_parallel=1,
    )
    recipes = engine_recipes()
    assert not started_as(recipes["trtllm-2024"], run).has_api_server
    assert started_as(recipes["trtllm"], run).has_api_server


def test_a_batch_from_a_script_waits_for_none_nor_do_prefill_workers(catalog: Catalog) -> None:
    problem, pool = asked(catalog)
    scripted = pool_worker(problem.site, replace(pool, role=Role.PREFILL), problem.workload)
    assert scripted.front_end_s == 0.0
    assert scripted.step_cost().front_end_s == 0.0


def test_the_parts_of_an_iteration_name_it(catalog: Catalog) -> None:
    problem, pool = asked(catalog)
    parts = {part.name: part.seconds for part in iteration_parts(problem, pool, num_running=512.0)}
    found = pool_worker(problem.site, pool, problem.workload)
    step_s = found.step_cost().step_s(512, 512 * (PROMPT + ANSWER / 2.0), 0, 0, 0.0)
    assert parts["API server"] > 0.5 * step_s
    assert sum(parts.values()) == pytest.approx(step_s, rel=0.02)
