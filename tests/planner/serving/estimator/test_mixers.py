"""Layers that are not softmax attention and an MLP: recurrent states, sparse attention, hybrids of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from serving_workers import all_attention, worker_of

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.models.layers.recurrent import LayerBlocks, Mixer
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.surfaces.recurrent import DECODE, PREFILL, recurrent_kernel
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.memory import kv_bytes_per_token, state_bytes_per_request, worker_memory
from meshplan.planner.serving.problem.config import EngineLimits, Layout
from meshplan.planner.serving.problem.quantization import Quantization


def test_delta_rules_launch_more_kernels_for_prompts_alone(hybrid: ModelShape, machine: Machine) -> None:
    """36 of Qwen3-Next's layers, 13 kernels each; none with attention in their place, or in a decode without graphs."""
    each = 1e-3
    constants = ServingConstants(host_step_s=0.0, launch_s_per_prompt_kernel=each)
    worker = worker_of(hybrid, machine)
    none = worker.step_cost(replace(constants, launch_s_per_prompt_kernel=0.0)).prefill_least_s
    assert worker.step_cost(constants).prefill_least_s - none == pytest.approx(36 * 13 * each)
    assert worker_of(all_attention(hybrid), machine).step_cost(constants).prefill_least_s == pytest.approx(none)
    eager = replace(worker, limits=replace(worker.limits, cuda_graphs=False))
    many, few = (eager.step_cost(replace(constants, launch_s_per_prompt_kernel=s)) for s in (each, 0.0))
    assert [many.decode_s(count) for count in (1, 64)] == [few.decode_s(count) for count in (1, 64)]


def test_blocks_that_say_nothing_new_change_nothing(llama: ModelShape, machine: Machine) -> None:
    layers = llama.num_hidden_layers
    written = replace(llama, blocks=LayerBlocks(mixers=(Mixer.ATTENTION,) * layers, has_mlp=(True,) * layers))
    knots = np.array([1.0, 64.0, 2048.0])
    for one, other in zip(
        worker_of(written, machine).dense_parts_s(knots).values(),
        worker_of(llama, machine).dense_parts_s(knots).values(),
        strict=True,
    ):
        assert one.tolist() == other.tolist()


def test_only_attention_layers_hold_keys_and_values(hybrid: ModelShape) -> None:
    full = kv_bytes_per_token(all_attention(hybrid), Quantization.uniform("bf16"))
    assert kv_bytes_per_token(hybrid, Quantization.uniform("bf16")) == full / 4
    assert full == 2 * 2 * 256 * 2 * 48


def test_a_recurrent_state_weighs_less_the_longer_the_context(hybrid: ModelShape, machine: Machine) -> None:
    layout = Layout(tensor_parallel=4, expert_tensor_parallel=4)
    limits, formats = EngineLimits(max_num_seqs=64, max_batched_tokens=4096), Quantization.uniform("bf16")
    held = [
        context * worker_memory(hybrid, machine.device, layout, limits, formats, context=context).kv_bytes_per_token
        for context in (1.0, 1000.0, 100_000.0)
    ]
    state = state_bytes_per_request(hybrid, tensor_parallel=4)
    cached = kv_bytes_per_token(hybrid, formats, tensor_parallel=4)
    assert held == pytest.approx([state + cached * context for context in (1.0, 1000.0, 100_000.0)])


def test_decodes_of_a_hybrid_hardly_grow_with_context(hybrid: ModelShape, machine: Machine) -> None:
    layout = Layout(tensor_parallel=4, expert_tensor_parallel=4)
    seqs, contexts = np.array([32.0, 32.0]), np.array([1000.0, 64_000.0])
    recurrent, softmax = (
        worker_of(shape, machine, layout=layout).decode_attention_s(seqs, contexts)
        for shape in (hybrid, all_attention(hybrid))
    )
    assert recurrent[1] - recurrent[0] == pytest.approx((softmax[1] - softmax[0]) / 4, rel=1e-6)
    assert recurrent[0] > 0.0


def test_a_decode_pays_its_update_and_no_scan(hybrid: ModelShape, machine: Machine) -> None:
    """Between two batches of decodes the states' part grows by the timed update alone: the scan that the dense table
    counts for every token is taken off again."""
    seqs, context = np.array([64.0, 128.0]), np.array([1000.0, 1000.0])
    worker = worker_of(hybrid, machine)
    mixers = worker.mixers
    assert mixers.recurrent is not None
    kernel = recurrent_kernel("h100-sxm-80gb", "gated-delta", "vllm", DECODE)
    scan = recurrent_kernel("h100-sxm-80gb", "gated-delta", "vllm", PREFILL)
    assert kernel is not None
    assert scan is not None
    elements = 64.0 * mixers.recurrent.state_elements / worker.layout.tensor_parallel
    grown = np.diff(mixers.decode_s(seqs, context))[0] / hybrid.num_recurrent_layers
    kept = 64.0 * 4.0 * mixers.recurrent.convolution_elements / worker.layout.tensor_parallel
    kept_s = float(worker.operators.memory_op_s(np.array(kept), kernels=0.0))
    assert grown == pytest.approx(elements / kernel.elements_per_s - elements / scan.elements_per_s + kept_s, rel=1e-6)


def test_launch_shapes_slow_states_that_nobody_tuned_for(catalog: Catalog, machine: Machine) -> None:
    """Heads of 80 × 128 (Nemotron-Nano-v2) as their kernel allows; tuned ones, and kernels that no table limits, as
    memory does. 8,192 heads of 64 × 128 took 188 µs on an H200 (vLLM pull request 44251)."""
    shape = catalog.model_shape("nemotron-3-nano-30b-a3b")
    seqs, context = np.array([256.0]), np.array([1000.0])
    memory, limited = (
        replace(worker_of(shape, machine), state_updates_per_s=rate).decode_attention_s(seqs, context)[0]
        for rate in (math.inf, 1e11)
    )
    assert limited > 2.0 * memory
    heads_bound_s = 8192 * 64 * 128 / engine_recipes()["vllm-2025"].most_state_updates_per_s("hopper", 64 * 128)
    assert heads_bound_s == pytest.approx(188e-6, rel=0.01)


def test_sparse_attention_reads_less_of_long_contexts(catalog: Catalog, deepseek: ModelShape, machine: Machine) -> None:
    sparse = catalog.model_shape("deepseek-v3.2")
    seqs, contexts = np.array([32.0, 32.0]), np.array([1000.0, 64_000.0])
    some, all_of_it = (worker_of(shape, machine).decode_attention_s(seqs, contexts) for shape in (sparse, deepseek))
    assert some[0] > all_of_it[0]  # the indexer is work, and saves nothing below top_k
    assert some[1] < all_of_it[1]
