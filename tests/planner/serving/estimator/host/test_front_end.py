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
from meshplan.planner.service import make_plan
from meshplan.planner.serving.estimator.breakdown import iteration_parts
from meshplan.planner.serving.estimator.host.front_end import MESSAGE_S, NO_FRONT_END, REQUEST_S, FrontEnd
from meshplan.planner.serving.estimator.host.graphs import Graphs
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role, ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.deployment import serve, slowest_front_ends

EACH_S = MESSAGE_S
ANSWER, PROMPT = 200, 220


def asked(catalog: Catalog, *, ranks: int = 1, **workload: Any) -> tuple[ServingProblem, Pool]:
    """Llama-3.2-1B, of which an A100 computes more tokens than one process hands on."""
    said = {"input_length": PROMPT, "output_length": ANSWER, "concurrency": 512, **workload}
    said = {key: value for key, value in said.items() if value is not None}
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
    alone = replace(worker, front_end=NO_FRONT_END).step_cost().step_s(num_seqs, context, 0, 0, 0.0)
    expected = (alone**4 + (num_seqs * EACH_S) ** 4) ** 0.25
    assert worker.step_cost().step_s(num_seqs, context, 0, 0, 0.0) == pytest.approx(expected)


@pytest.mark.parametrize("num_seqs", [16, 480])
@pytest.mark.parametrize("tokens", [300, 6000])
def test_it_works_beside_prompts_too_not_before_them(worker: Worker, num_seqs: int, tokens: int) -> None:
    """Of all that an iteration with prompts takes the front end hides as much as it can."""
    worker = replace(worker, graphs=Graphs(tokens=8192, is_fixed=True))
    load = (num_seqs, num_seqs * float(PROMPT), -(-tokens // PROMPT), tokens, 110.0 * tokens)
    alone = replace(worker, front_end=NO_FRONT_END).step_cost().step_s(*load)
    expected = (alone**4 + (num_seqs * EACH_S) ** 4) ** 0.25
    assert worker.step_cost().step_s(*load) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_closed_loop_comes_no_faster_than_its_api_servers_let_requests_pass(catalog: Catalog, workers: int) -> None:
    """What the engines could do more waits before the first token, not between tokens."""
    problem, pool = asked(catalog, num_requests=3000, concurrency=512 * workers)
    pool = replace(pool, num_workers=workers)
    config = ServingConfig(engine="vllm", pools=(pool,))
    scripted = replace(problem.site, recipe=replace(problem.site.recipe, has_api_server=False))
    with_it, without = (serve(site, config, problem.workload) for site in (problem.site, scripted))
    rate, free = (3000 / float(run.finish_s.max()) for run in (with_it, without))
    most = workers / (ANSWER * MESSAGE_S + REQUEST_S)
    assert free > 1.3 * most  # else there is nothing to see
    assert 0.97 * most < rate < 1.02 * most
    first, alone = (run.first_token_s - run.arrival_s for run in (with_it, without))
    assert first[600:].mean() > 5.0 * alone[600:].mean()
    gaps, alone = ((run.finish_s - run.first_token_s).mean() for run in (with_it, without))
    assert gaps < 1.3 * alone


@pytest.mark.parametrize("in_flight", [64, 512])
def test_clients_who_all_begin_at_once_pass_one_by_one(catalog: Catalog, in_flight: int) -> None:
    """No request follows another: without parsing 512 came at four times the rate that a process lets pass."""
    problem, pool = asked(catalog, num_requests=in_flight, concurrency=in_flight)
    run = serve(problem.site, ServingConfig(engine="vllm", pools=(pool,)), problem.workload)
    assert in_flight / float(run.finish_s.max()) < 1.0 / REQUEST_S
    waited_s = run.first_token_s - run.arrival_s
    assert waited_s.max() > (in_flight - 1) * REQUEST_S
    assert not run.arrival_s.any()


def test_requests_that_come_by_themselves_wait_for_what_came_before(catalog: Catalog) -> None:
    """One process that works off requests and, between two, the messages of as many: by hand."""
    front_end = FrontEnd(processes=1)
    arrival_s = np.array([0.0, 0.0, 1.0, 1.001, 1.002, 10.0])
    sent_per_s = 6 / 10.0 * 20.0
    waits, free_s, before_s = [], 0.0, 0.0
    for at_s in arrival_s:
        free_s = max(free_s + (at_s - before_s) * sent_per_s * MESSAGE_S, at_s) + REQUEST_S
        waits.append(free_s - REQUEST_S - at_s)
        before_s = at_s
    assert front_end.waits_s(arrival_s, 20.0, answered_per_s=1e3) == pytest.approx(waits)
    assert waits[1] == pytest.approx(REQUEST_S)
    assert waits[4] > REQUEST_S
    two = FrontEnd(processes=2).waits_s(arrival_s, 20.0, answered_per_s=1e3)
    assert (two <= front_end.waits_s(arrival_s, 20.0, answered_per_s=1e3) + 1e-12).all()
    assert not FrontEnd(processes=1, parses=False).waits_s(arrival_s, 20.0, answered_per_s=1e3).any()
    assert not NO_FRONT_END.waits_s(arrival_s, 20.0, answered_per_s=1e3).any()


@pytest.mark.parametrize("between_s", [0.0, 1e-3, 5e-3])
def test_no_more_pass_than_it_works_off(between_s: float) -> None:
    """Of a burst one in r, of more than it lets pass one in r + k·s, of those that engines do not answer less."""
    front_end = FrontEnd(processes=1)
    arrival_s = between_s * np.arange(5000)
    passed_s = arrival_s + front_end.waits_s(arrival_s, 400.0, answered_per_s=1e6)
    assert np.diff(passed_s) == pytest.approx(front_end.request_s(400.0) if between_s else REQUEST_S, rel=1e-3)
    passed_s = arrival_s + front_end.waits_s(arrival_s, 400.0, answered_per_s=5.0)
    assert np.diff(passed_s) == pytest.approx(REQUEST_S + between_s * 5.0 * 400.0 * MESSAGE_S, rel=1e-3)


def test_a_rate_above_what_it_lets_pass_is_not_kept_pace_with(catalog: Catalog) -> None:
    most = 1.0 / (ANSWER * MESSAGE_S + REQUEST_S)
    waits = []
    for share in (0.5, 0.9, 1.2):
        problem, pool = asked(catalog, concurrency=None, request_rate_per_s=share * most, num_requests=4000)
        run = serve(problem.site, ServingConfig(engine="vllm", pools=(pool,)), problem.workload)
        waits.append((run.first_token_s - run.arrival_s)[-400:].mean())
    assert waits[0] < waits[1] < 0.5
    assert waits[2] > 5.0  # and grows with the run


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
    assert found.step_cost().request_s == pytest.approx((REQUEST_S + ANSWER * MESSAGE_S) / 4.0)
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


def test_tokens_of_decode_workers_pass_no_api_server_of_prefill_workers(catalog: Catalog) -> None:
    """Decode workers that send 20 at once were held to the pace of prefill workers that send one."""
    problem, pool = asked(catalog)
    prefill = replace(pool, role=Role.PREFILL)
    decode = replace(pool, role=Role.DECODE, num_workers=2, limits=replace(pool.limits, stream_interval=20))
    for pools in ((prefill, decode), (decode, prefill)):
        front_end, messages = slowest_front_ends(
            problem.site, ServingConfig(engine="vllm", pools=pools), problem.workload
        )
        assert front_end.request_s(messages) == pytest.approx(REQUEST_S)
    few = replace(decode, num_workers=1)
    front_end, messages = slowest_front_ends(
        problem.site, ServingConfig(engine="vllm", pools=(prefill, few)), problem.workload
    )
    assert front_end.request_s(messages) == pytest.approx(REQUEST_S + ANSWER * MESSAGE_S / 20.0)


def test_the_parts_of_an_iteration_name_it(catalog: Catalog) -> None:
    problem, pool = asked(catalog)
    parts = {part.name: part.seconds for part in iteration_parts(problem, pool, num_running=512.0)}
    found = pool_worker(problem.site, pool, problem.workload)
    step_s = found.step_cost().step_s(512, 512 * (PROMPT + ANSWER / 2.0), 0, 0, 0.0)
    assert parts["API server"] > 0.2 * step_s
    assert sum(parts.values()) == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize("num_requests", [1, 40, 2000])
def test_no_burst_is_faster_than_its_bound(catalog: Catalog, num_requests: int) -> None:
    """The search cuts workers by it: prompts of a burst are parsed while answers of others are computed."""
    problem, pool = asked(catalog, concurrency=None, arrival="all_at_once", num_requests=num_requests, output_length=2)
    run = serve(problem.site, ServingConfig(engine="vllm", pools=(pool,)), problem.workload)
    least_s = pool_worker(problem.site, pool, problem.workload).step_cost().request_s
    assert float(run.finish_s.max()) >= num_requests * least_s
    assert (num_requests > 1) == (least_s > 0.9 * REQUEST_S)


def test_a_burst_that_waits_for_it_may_run_whole(catalog: Catalog) -> None:
    """Rates are one from three running requests on; a cap of three made a third fewer tokens."""
    asked_for = {
        "kind": "serving",
        "model": "llama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-b200", "count": 1}]},
        "constraints": {"max_devices": 1, "target": "vllm", "rent": "device"},
        "objective": "throughput_per_device",
        "workload": {"input_length": 100, "output_length": 4, "arrival": "all_at_once", "num_requests": 600},
    }
    made = make_plan(asked_for, catalog)
    assert made.config["pools"][0]["limits"]["max_num_seqs"] >= 256
    assert made.predicted["requests_per_s"].value == pytest.approx(1.0 / REQUEST_S, rel=0.05)
