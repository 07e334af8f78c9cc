"""Correctness probes of iteration costs: what every serving estimator must get right before any constant is fitted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_workers import worker_of

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.surfaces.experts import ExpertShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator import operators
from meshplan.planner.serving.estimator.memory import kv_bytes_per_token, worker_memory
from meshplan.planner.serving.problem.config import EngineLimits, Layout
from meshplan.planner.serving.problem.quantization import Quantization


def test_llama_70b_holds_its_published_bytes_a_token(llama: ModelShape) -> None:
    assert kv_bytes_per_token(llama, Quantization.uniform("bf16")) == 2 * 8 * 128 * 2 * 80


def test_a_token_costs_more_the_longer_its_context(llama: ModelShape, machine: Machine) -> None:
    cost = worker_of(llama, machine).step_cost()
    short, long = (cost.step_s(32, 32 * context, 0, 0, 0.0) for context in (128, 4000))
    assert long > 1.02 * short


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_narrow_weights_decode_faster(llama: ModelShape, machine: Machine, scheme: str) -> None:
    wide, narrow = (
        worker_of(llama, machine, quantization=Quantization.uniform(name)).step_cost().decode_s(1)
        for name in ("fp16", scheme)
    )
    assert narrow < 0.9 * wide


def test_the_network_between_nodes_counts(deepseek: ModelShape, machine: Machine) -> None:
    layout = Layout(attention_data_parallel=16, expert_parallel=16)
    halved = replace(machine, scale_out_bytes_per_s=machine.scale_out_bytes_per_s / 2.0)
    formats = Quantization.uniform("fp8_block")
    full, half = (
        worker_of(deepseek, which, layout=layout, quantization=formats, limits=EngineLimits(max_num_seqs=2048))
        .step_cost()
        .decode_s(2048)
        for which in (machine, halved)
    )
    assert half > 1.05 * full


def test_attention_ten_times_slower_changes_the_answer(
    llama: ModelShape, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = worker_of(llama, machine).step_cost()
    plain = operators.Operators.decode_attention_s
    monkeypatch.setattr(
        operators.Operators, "decode_attention_s", lambda self, *args, **sizes: 10.0 * plain(self, *args, **sizes)
    )
    after = worker_of(llama, machine).step_cost()
    assert after.step_s(64, 64 * 4000, 0, 0, 0.0) > 1.5 * before.step_s(64, 64 * 4000, 0, 0, 0.0)


def test_all_reduces_of_the_engine_are_faster_than_nccls_for_small_messages(machine: Machine) -> None:
    from meshplan.planner.serving.estimator.exchange.collectives import Exchange

    size = np.array([64 * 1024.0])
    own = Exchange(machine=machine, engine="vllm").all_reduce_s(size, 8)
    nccl = Exchange(machine=machine, engine="vllm", custom_all_reduce=False).all_reduce_s(size, 8)
    assert own[0] < nccl[0]


@settings(max_examples=60, deadline=None)
@given(seqs=st.integers(1, 63), tokens=st.integers(1, 4000), each=st.integers(1000, 1900))
def test_more_work_never_costs_less(llama: ModelShape, machine: Machine, seqs: int, tokens: int, each: int) -> None:
    """With its context, which lies where attention was made linear."""
    cost, context = _cost(llama, machine), seqs * each
    base = cost.step_s(seqs, context, 1, tokens, tokens**2 / 2)
    assert cost.step_s(seqs + 1, context + each, 1, tokens, tokens**2 / 2) >= base
    assert cost.step_s(seqs, context + 100, 1, tokens, tokens**2 / 2) >= base
    assert cost.step_s(seqs, context, 1, tokens + 1, (tokens + 1) ** 2 / 2) >= base
    assert cost.step_s(seqs, context, 0, 0, 0.0) <= base


_COSTS: dict[str, Any] = {}


def _cost(shape: ModelShape, machine: Machine) -> Any:
    if shape.slug not in _COSTS:
        _COSTS[shape.slug] = worker_of(shape, machine).step_cost()
    return _COSTS[shape.slug]


def test_constants_enter_where_they_say(llama: ModelShape, machine: Machine) -> None:
    worker = worker_of(llama, machine)
    plain = ServingConstants(decode_factor=1.0, prefill_factor=1.0, host_step_s=0.0, host_s_per_seq=0.0)
    base = worker.step_cost(plain)
    assert worker.step_cost(replace(plain, host_step_s=3e-3)).decode_s(8) - base.decode_s(8) == pytest.approx(3e-3)
    assert worker.step_cost(replace(plain, host_s_per_seq=1e-4)).decode_s(8) - base.decode_s(8) == pytest.approx(8e-4)
    slow = worker.step_cost(replace(plain, launch_s_per_layer=1e-2))
    assert slow.step_s(0, 0, 1, 10, 55.0) == pytest.approx(1e-2 * llama.num_hidden_layers)
    assert slow.decode_s(8) == base.decode_s(8)
    late = replace(plain, first_token_steps=2.5)
    assert worker.step_cost(late).admission_steps == 0.0
    assert replace(worker, prepares_ahead=True).step_cost(late).admission_steps == 2.5
    remote = replace(worker, remote_step_s=2e-3, remote_s_per_seq=1e-4).step_cost(plain)
    assert remote.decode_s(8) - base.decode_s(8) == pytest.approx(2e-3 + 8e-4)
    assert remote.prefill_least_s - base.prefill_least_s == pytest.approx(2e-3)


def test_latent_layers_are_launched_at_a_time_of_their_own(
    llama: ModelShape, deepseek: ModelShape, machine: Machine
) -> None:
    for shape, own, other in (
        (llama, "launch_s_per_layer", "launch_s_per_latent_layer"),
        (deepseek, "launch_s_per_latent_layer", "launch_s_per_layer"),
    ):
        worker, plain = worker_of(shape, machine), ServingConstants(host_step_s=0.0, launch_s_of_experts=0.0)
        slow = worker.step_cost(replace(plain, **{own: 1e-2}))
        assert slow.prefill_least_s == pytest.approx(1e-2 * shape.num_hidden_layers)
        assert (
            worker.step_cost(replace(plain, **{other: 1e-2})).prefill_least_s == worker.step_cost(plain).prefill_least_s
        )


def test_experts_add_their_launches_where_layers_have_them(
    llama: ModelShape, deepseek: ModelShape, machine: Machine
) -> None:
    """61 layers of DeepSeek-R1 have latent attention, and all but the first three experts; Llama has none."""
    for shape, attention, experts in ((llama, 1e-3 * llama.num_hidden_layers, 0), (deepseek, 2e-3 * 61, 58)):
        times = {"launch_s_per_layer": 1e-3, "launch_s_per_latent_layer": 2e-3, "launch_s_of_experts": 4e-3}
        cost = worker_of(shape, machine).step_cost(ServingConstants(host_step_s=0.0, **times))
        assert cost.prefill_least_s == pytest.approx(attention + 4e-3 * experts)


def test_launch_and_device_time_join_smoothly(llama: ModelShape, machine: Machine) -> None:
    """Neither hides the other from a fit: near each other both count, far apart the longer one does."""
    plain = ServingConstants(host_step_s=0.0, launch_s_per_layer=0.0)
    device = worker_of(llama, machine).step_cost(plain).step_s(0, 0, 1, 4000, 8e6)
    for share, expected in ((0.25, 1.001), (1.0, 2.0**0.25)):
        launch = share * device / llama.num_hidden_layers
        joined = worker_of(llama, machine).step_cost(replace(plain, launch_s_per_layer=launch))
        assert joined.step_s(0, 0, 1, 4000, 8e6) == pytest.approx(expected * device, rel=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 4.0])
def test_decodes_without_graphs_are_launched_beside_the_device(
    llama: ModelShape, machine: Machine, share: float
) -> None:
    """An iteration takes the fourth root of t⁴ + l⁴, at both ends of its contexts and nearly between them."""
    plain, limits = ServingConstants(launch_s_per_layer=0.0), EngineLimits(max_num_seqs=64, max_batched_tokens=4096)
    graphed = worker_of(llama, machine).step_cost(plain)
    launch = share * graphed.step_s(8, 8 * 1000.0, 0, 0, 0.0)
    constants = replace(plain, launch_s_per_layer=launch / llama.num_hidden_layers)
    eager = worker_of(llama, machine, limits=replace(limits, cuda_graphs=False)).step_cost(constants)
    for context, near in ((1000.0, 1e-6), (1500.0, 2e-3), (2000.0, 1e-6)):
        replayed, launched = graphed.step_s(8, 8 * context, 0, 0, 0.0), launch + plain.host_step_s
        joined = (replayed**4 + launched**4) ** 0.25
        assert eager.step_s(8, 8 * context, 0, 0, 0.0) == pytest.approx(joined, rel=near)


def test_tokens_that_choose_by_themselves_hit_fewer_experts_than_balanced_ones(
    deepseek: ModelShape, machine: Machine
) -> None:
    """Expert times are measured with balanced routing: 32 tokens × 8 choices hit all 256, choosing freely 163."""
    worker, sizes = (
        worker_of(deepseek, machine, quantization=Quantization.uniform("fp8_block")),
        np.array([32.0, 4096.0]),
    )
    experts = ExpertShape(hidden_size=7168, expert_size=256, top_k=8, num_experts=256)
    table = worker.operators._expert_kernels_s("fp8_block", sizes, experts)
    assert table is not None
    shares = worker.routed_s(sizes) / table
    assert 163 / 256 - 0.05 < shares[0] < 0.95
    assert shares[1] == pytest.approx(1.0, abs=1e-3)


def test_all_reduces_of_another_engine_can_be_borrowed(llama: ModelShape, machine: Machine) -> None:
    own, trtllm = worker_of(llama, machine), worker_of(llama, machine, engine="trtllm")
    borrowed = worker_of(llama, machine, all_reduce="trtllm")
    tokens = np.array([8.0, 64.0])
    assert borrowed.all_reduce_s(tokens).tolist() == trtllm.all_reduce_s(tokens).tolist()
    assert borrowed.all_reduce_s(tokens).tolist() != own.all_reduce_s(tokens).tolist()


def test_the_cache_has_the_blocks_that_vllm_printed(llama: ModelShape, machine: Machine) -> None:
    """vLLM 0.15.1, Llama-3.1-70B on four H100 with 0.9 of their memory (sim-to-real validation of BLIS).

    30,425 blocks of 16 tokens with 2,048 tokens an iteration, 30,251 with 8,192.
    """
    for tokens, printed in ((2048, 30425), (8192, 30251)):
        memory = worker_memory(
            llama,
            machine.device,
            Layout(tensor_parallel=4, expert_tensor_parallel=4),
            EngineLimits(max_num_seqs=128, max_batched_tokens=tokens, memory_fraction=0.9),
            Quantization.uniform("fp16"),
            context=800,
        )
        assert memory.kv_capacity_tokens / 16 == pytest.approx(printed, rel=0.03)


def test_products_in_blocks_are_as_slow_as_the_library_that_is_called(catalog: Catalog) -> None:
    """Weights are read, then multiplied; small products and those in another format stay as they were timed."""
    device = catalog.device("b200-sxm-180gb")
    timed, slower = (
        operators.Operators(device=device, engine="sglang", block_flops_per_s=rate) for rate in (math.inf, 4.42e14)
    )
    rows = np.array([1.0, 32.0, 1024.0, 2048.0])
    as_timed, called = (each.gemm_s("fp8_block", rows, 24576.0, 7168.0) for each in (timed, slower))
    assert called[:1] == as_timed[:1]
    assert called[2:] == pytest.approx([826e-6, 1633e-6], rel=0.05)  # published; DeepGEMM's took 146 and 260 us
    assert (called >= as_timed).all()
    assert (slower.gemm_s("nvfp4", rows, 24576.0, 7168.0) == timed.gemm_s("nvfp4", rows, 24576.0, 7168.0)).all()


def test_ranks_padded_to_the_fullest_compute_its_tokens_each(deepseek: ModelShape, machine: Machine) -> None:
    layout = Layout(attention_data_parallel=8, expert_parallel=8)
    formats = Quantization.uniform("fp8_block")
    plain = worker_of(deepseek, machine, layout=layout, quantization=formats)
    even, padded = plain.step_cost(), replace(plain, pads_ranks=True).step_cost()
    for running in (8, 64):  # as many on every rank: nothing is padded
        assert padded.decode_s(running) == pytest.approx(even.decode_s(running), rel=1e-3)
    pairs = 2000.0 * 2001.0 / 2.0
    one, eight = (cost.step_s(0, 0.0, 1, 2000, pairs) for cost in (even, padded))
    full = even.step_s(0, 0.0, 8, 8 * 2000, 8 * pairs)
    assert one < 0.9 * eight
    assert eight == pytest.approx(full, rel=1e-3)  # one rank's prompt costs what a prompt on each does
    alone = worker_of(deepseek, machine, quantization=formats)
    assert replace(alone, pads_ranks=True).step_cost().decode_s(8) == alone.step_cost().decode_s(8)


def test_ranks_gather_all_tokens_where_nothing_sends_them_to_single_experts(
    deepseek: ModelShape, machine: Machine
) -> None:
    tokens, spread = np.array([8.0, 1024.0]), Layout(attention_data_parallel=8, expert_parallel=8)
    whole = worker_of(deepseek, machine, layout=spread, quantization=Quantization.uniform("fp8_block"))
    gathers = replace(whole, gathers_tokens=True)
    split = replace(whole, layout=replace(spread, expert_parallel=1, expert_tensor_parallel=8))
    sent, gathered, quantised = (each.expert_exchange_s(tokens) for each in (whole, gathers, split))
    assert np.all(sent < quantised)  # experts that all devices split need every token, whatever the engine
    assert np.all(quantised <= gathered)  # all-to-all engines quantise first: 8 bits instead of 16
    assert quantised[1] < gathered[1]
    assert replace(split, gathers_tokens=True).expert_exchange_s(tokens) == pytest.approx(gathered)
    one = replace(gathers, layout=Layout(tensor_parallel=8, expert_parallel=8))
    assert not one.expert_exchange_s(tokens).any()  # no ranks: the all-reduce suffices


@pytest.mark.parametrize(
    ("slug", "ratio"), [("gb200", 37.08 / 13.48), ("gh200", 33.17 / 13.48), ("b200-sxm-180gb", 1.0)]
)
def test_hosts_launch_eager_layers_as_fast_as_they_were_measured(
    catalog: Catalog, llama: ModelShape, machine: Machine, slug: str, ratio: float
) -> None:
    """Grace beside a Xeon (NVIDIA/TransformerEngine, issue 2053); what graphs or a compiler launch was not compared."""
    there = replace(machine, device=catalog.device(slug))
    constants = ServingConstants(host_step_s=0.0, launch_s_per_layer=1e-4)
    for cuda_graphs, times in ((True, 1.0), (False, ratio)):
        limits = EngineLimits(max_num_seqs=64, max_batched_tokens=4096, cuda_graphs=cuda_graphs)
        cost = worker_of(llama, there, limits=limits, constants=constants).step_cost()
        assert cost.prefill_least_s == pytest.approx(times * 80 * 1e-4)
