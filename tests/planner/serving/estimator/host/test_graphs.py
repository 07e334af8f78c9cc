"""Iterations that are replayed from CUDA graphs, and those that no graph holds."""

from __future__ import annotations

from dataclasses import replace

from serving_workers import all_attention, worker_of

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.host.graphs import Graphs
from meshplan.planner.serving.problem.config import EngineLimits, Layout


def test_short_iterations_with_prompts_are_replayed_from_graphs(llama: ModelShape, machine: Machine) -> None:
    """80 layers at 5 ms each would last 0.4 s; from a graph an iteration lasts as long as its kernels."""
    constants = ServingConstants(launch_s_per_layer=5e-3)
    launched = worker_of(llama, machine, constants=constants).step_cost()
    graphed = worker_of(llama, machine, constants=constants, graphs=Graphs(tokens=512)).step_cost()
    few = worker_of(
        llama,
        machine,
        constants=constants,
        graphs=Graphs(tokens=512),
        limits=EngineLimits(max_num_seqs=16, max_batched_tokens=4096),
    ).step_cost()
    fixed = worker_of(llama, machine, constants=constants, graphs=Graphs(tokens=512, is_fixed=True)).step_cost()
    for cost, tokens, is_launched in (
        (graphed, 128, False),
        (graphed, 129, True),
        (few, 32, False),
        (few, 33, True),
        (fixed, 512, False),
        (fixed, 513, True),
    ):
        assert (cost.step_s(0, 0.0, 1, tokens, tokens * (tokens + 1) / 2) >= 0.4) == is_launched
    assert launched.step_s(0, 0.0, 1, 1, 1.0) >= 0.4


def test_decodes_are_priced_from_the_graphs_that_launch_files_set(llama: ModelShape, machine: Machine) -> None:
    """Of vLLM on Hopper: 512 requests of a rank by itself, up to 1,024 where a launch file says so."""
    recipe, device = engine_recipes()["vllm"], machine.device
    layout, limits = Layout(tensor_parallel=8), EngineLimits(max_num_seqs=900)
    own, raising = (Graphs.of(recipe, llama, device, raises=raises) for raises in (False, True))
    assert [graphs.raised_size(layout, limits) for graphs in (own, raising)] == [0, 912]
    assert raising.raised_size(layout, EngineLimits(max_num_seqs=512)) == 0
    assert raising.raised_size(replace(layout, attention_data_parallel=2), limits) == 0
    constants = ServingConstants(launch_s_per_layer=5e-3)
    launched, replayed = (
        worker_of(llama, machine, constants=constants, limits=limits, graphs=graphs).step_cost().decode_s(900)
        for graphs in (own, raising)
    )
    assert launched >= 0.4 > replayed


def test_sglang_replays_prompts_of_any_size_from_graphs_on_one_stage(
    llama: ModelShape, machine: Machine, catalog: Catalog
) -> None:
    """0.5.10 and newer; latent attention up to 8,192 tokens on Hopper, none on Blackwell (arg_groups/*_hook.py)."""
    limits = EngineLimits(max_num_seqs=16, max_batched_tokens=16_384, chunked_prefill=False)
    worker = worker_of(llama, machine, limits=limits, graphs=Graphs(any_prompts=True))
    assert worker.captured_tokens == 16_384
    stages = replace(worker, layout=replace(worker.layout, pipeline_parallel=2))
    latent = replace(worker, shape=catalog.model_shape("deepseek-v3"))
    on_blackwell = replace(latent, machine=replace(machine, device=catalog.device("b200-sxm-180gb")))
    assert [one.captured_tokens for one in (stages, latent, on_blackwell)] == [0, 8192, 0]
    assert replace(worker, limits=replace(limits, cuda_graphs=False)).captured_tokens == 0
    assert [engine_recipes()[name].graphs_prompts for name in ("sglang-0.5", "sglang", "vllm")] == [False, True, False]


def test_prompts_of_a_hybrid_are_never_replayed_whole(hybrid: ModelShape, machine: Machine) -> None:
    graphed = replace(worker_of(hybrid, machine), graphs=Graphs(tokens=512))
    assert graphed.captured_tokens == 0
    assert replace(graphed, shape=all_attention(hybrid)).captured_tokens > 0
