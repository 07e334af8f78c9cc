"""Engines whose host works while the devices do: an iteration takes about the longer of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from meshplan.catalogs.constants.engine_recipes import engine_observed_as, engine_recipes
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.constants.serving_benchmarks import BenchmarkRun, started_as
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Cluster, NodeGroup
from meshplan.planner.cluster.machine import machine_of
from meshplan.planner.serving.estimator.host.graphs import NO_LIMIT, Graphs
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker
from meshplan.planner.serving.estimator.sampling import SamplingCost
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Speculation
from meshplan.planner.serving.problem.quantization import Quantization

IDLE = ServingConstants(host_step_s=0.0, host_s_per_seq=0.0)
HOST = replace(IDLE, host_step_s=2e-3, host_s_per_seq=1e-4)
CONTEXTS = ContextRange(prompt=1000.0, least=1000.0, most=3000.0)


def worker(catalog: Catalog, **changes: Any) -> Worker:
    """Llama-3.1-8B on one H100, whose host prepares ahead."""
    found = Worker(
        shape=catalog.model_shape("llama-3.1-8b"),
        machine=machine_of(Cluster(name="one", groups=(NodeGroup(node=catalog.node_type("dgx-h100"), count=1),))),
        engine="vllm",
        layout=Layout(tensor_parallel=1),
        limits=EngineLimits(max_num_seqs=256, max_batched_tokens=4096),
        quantization=Quantization.uniform("bf16"),
        constants=HOST,
        contexts=CONTEXTS,
        prepares_ahead=True,
        hides_host=True,
    )
    return replace(found, **changes)


def decode_s(found: Worker, num_seqs: int, context: float) -> float:
    return found.step_cost().step_s(num_seqs, num_seqs * context, 0, 0, 0.0)


@pytest.mark.parametrize("num_seqs", [1, 32, 256])
@pytest.mark.parametrize("context", CONTEXTS.ends)
def test_a_decode_takes_about_the_longer_of_device_and_host(catalog: Catalog, num_seqs: int, context: float) -> None:
    device_s = decode_s(worker(catalog, constants=IDLE), num_seqs, context)
    host_s = 2e-3 + 1e-4 * num_seqs
    expected = (device_s**4 + host_s**4) ** 0.25
    assert decode_s(worker(catalog), num_seqs, context) == pytest.approx(expected)
    assert decode_s(worker(catalog, hides_host=False), num_seqs, context) == pytest.approx(device_s + host_s)


def test_each_attention_rank_has_a_host_of_its_own(catalog: Catalog) -> None:
    ranks = Layout(tensor_parallel=1, attention_data_parallel=4)
    device_s = decode_s(worker(catalog, layout=ranks, constants=IDLE), 256, 1000.0)
    host_s = 2e-3 + 1e-4 * 64
    expected = (device_s**4 + host_s**4) ** 0.25
    assert decode_s(worker(catalog, layout=ranks), 256, 1000.0) == pytest.approx(expected)


def test_answers_are_copied_before_the_next_iteration_is_prepared(catalog: Catalog) -> None:
    """With penalties the host waits for the tokens of the iteration before (vLLM 0.11.1, gpu_input_batch.py)."""
    copied = SamplingCost(bytes_per_logit=40.0, kernels=1.0, host_s_per_token=2.5e-8)
    n, (first, last) = 128, CONTEXTS.ends
    for context, copy_s in ((first, 0.0), (last, 2.5e-8 * n * (last - first))):
        device_s = decode_s(worker(catalog, constants=IDLE, sampling=replace(copied, host_s_per_token=0.0)), n, context)
        host_s = 2e-3 + 1e-4 * n + copy_s
        expected = (device_s**4 + host_s**4) ** 0.25
        assert copy_s < device_s
        assert decode_s(worker(catalog, sampling=copied), n, context) == pytest.approx(expected)


def test_a_prompt_is_launched_while_the_decodes_before_it_run(catalog: Catalog) -> None:
    """Of 9.6 ms to launch 32 layers what is left after a decode, however long; a prompt alone waits for all of them."""
    launching = replace(HOST, launch_s_per_layer=0.3e-3)
    ahead = worker(
        catalog, constants=launching, limits=EngineLimits(max_num_seqs=4, max_batched_tokens=4096)
    ).step_cost()
    launch_s = 2e-3 + 32 * 0.3e-3
    assert ahead.prefill_least_s == pytest.approx(launch_s)
    device = replace(ahead, prefill_least_s=0.0)
    for num_seqs, context in ((1, 1000.0), (4, 8000.0)):
        prompt = (num_seqs, context, 1, 200, 200.0**2 / 2)
        left_s = launch_s - ahead.step_s(num_seqs, context, 0, 0, 0.0)
        assert 0.0 < left_s < launch_s
        assert ahead.step_s(*prompt) == pytest.approx((device.step_s(*prompt) ** 4 + left_s**4) ** 0.25)
    alone = (0, 0.0, 1, 200, 200.0**2 / 2)
    assert ahead.step_s(*alone) == pytest.approx((device.step_s(*alone) ** 4 + launch_s**4) ** 0.25)
    short = replace(ahead, prefill_least_s=1e-3)  # over before the decode is
    assert short.step_s(*prompt) == pytest.approx(device.step_s(*prompt))
    chunks = list(islice(ahead.chunks_s(4, 8000.0, 200, 100), 3))
    for done, (taken, context) in enumerate(zip(chunks, (8000.0, 8004.0, 8008.0), strict=True)):
        assert taken == ahead.step_s(4, context, 1, 200, 200 * (100 + 200 * done + 100.5))


def test_history_that_others_hold_is_read_all_the_same(catalog: Catalog) -> None:
    own, shared = (worker(catalog, shared_history=tokens).step_cost() for tokens in (0.0, 500.0))
    for num_seqs in (1, 64):
        long = own.step_s(num_seqs, num_seqs * 1700.0, 0, 0, 0.0)
        assert shared.step_s(num_seqs, num_seqs * 1200.0, 0, 0, 0.0) == pytest.approx(long)
        assert shared.step_s(num_seqs, num_seqs * 1700.0, 0, 0, 0.0) > long


def test_whoever_hides_its_host_prepares_ahead() -> None:
    recipes = engine_recipes().values()
    assert any(recipe.hides_host for recipe in recipes)
    assert all(recipe.prepares_ahead for recipe in recipes if recipe.hides_host)
    assert not any(recipe.hides_host for recipe in recipes if recipe.core == "vllm-v0")


def test_servers_started_with_async_scheduling_hide_it_in_older_releases() -> None:
    """ML.ENERGY's 0.11.1: what is a default from 0.14.0 on was a flag there."""
    found = engine_observed_as("vLLM", "0.11.1", "ML.ENERGY leaderboard")
    assert found is not None
    run = BenchmarkRun(
        title="ML.ENERGY leaderboard v3.0",
        device="h100-sxm-80gb",
        model="Qwen/Qwen3-32B",
        precision="bf16",
        input_length=300,
        output_length=500,
        concurrency=8,
        tensor_parallel=1,
        attention_data_parallel=1,
    )
    assert not found.hides_host
    assert started_as(found, run).hides_host


def test_a_batch_larger_than_any_graph_is_launched_kernel_by_kernel(catalog: Catalog) -> None:
    """vLLM captures graphs up to 512 tokens, 1,024 on a B200 since July 2026; those of other engines hold any batch."""
    limits = EngineLimits(max_num_seqs=1024, max_batched_tokens=4096)
    launching = replace(IDLE, host_step_s=1e-3, launch_s_per_layer=1e-3)
    graphed, any_size = (worker(catalog, limits=limits, constants=launching, graphs=Graphs(tokens=n)) for n in (512, 0))
    for context in CONTEXTS.ends:
        assert decode_s(graphed, 512, context) == pytest.approx(decode_s(any_size, 512, context))
        device_s = decode_s(worker(catalog, limits=limits, constants=IDLE), 513, context)
        expected = (device_s**4 + (32e-3 + 1e-3) ** 4) ** 0.25  # 32 layers
        assert decode_s(graphed, 513, context) == pytest.approx(expected)
        assert decode_s(graphed, 513, context) > 1.005 * decode_s(any_size, 513, context)


def test_each_attention_rank_has_graphs_of_its_own_and_drafts_fill_them(catalog: Catalog) -> None:
    limits = EngineLimits(max_num_seqs=1024, max_batched_tokens=4096)
    launching = replace(IDLE, launch_s_per_layer=1e-3)
    ranks = Layout(tensor_parallel=1, attention_data_parallel=2)
    apart = worker(catalog, limits=limits, constants=launching, layout=ranks, graphs=Graphs(tokens=512))
    assert decode_s(apart, 1024, 1000.0) == decode_s(replace(apart, graphs=NO_LIMIT), 1024, 1000.0)
    one = replace(apart, layout=Layout(tensor_parallel=1))
    drafts = Speculation(num_draft_tokens=3, acceptance=0.5)
    verifying = replace(one, speculation=drafts)
    free = replace(verifying, graphs=NO_LIMIT)
    assert decode_s(verifying, 128, 1000.0) == decode_s(free, 128, 1000.0)
    assert decode_s(verifying, 129, 1000.0) > decode_s(free, 129, 1000.0)
    of_requests = replace(free, graphs=Graphs(most_decodes=200))  # SGLang counts requests, whatever they verify
    assert decode_s(of_requests, 200, 1000.0) == decode_s(free, 200, 1000.0)
    assert decode_s(of_requests, 201, 1000.0) > decode_s(free, 201, 1000.0)
