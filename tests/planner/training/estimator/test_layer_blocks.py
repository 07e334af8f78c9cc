"""Layers that are not softmax attention and an MLP: the same work written in another way has the same price."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, H100_FP8, HYBRID, MOE, configured, machine_with, problem_of

from meshplan.catalogs.models.layers.recurrent import LayerBlocks, Mixer, SparseIndexer
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.surfaces.recurrent import PREFILL, recurrent_kernel
from meshplan.planner.training.estimator.flops import forward_flops_per_token
from meshplan.planner.training.estimator.priced import Priced, price

DEGREES = [
    {},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2, "micro_batch_size": 2},
    {"tensor_parallel": 2, "data_parallel": 2, "zero_stage": 3, "activation_recompute": "full"},
]


def priced(shape: ModelShape, **degrees: object) -> Priced:
    problem = problem_of(shape)
    return price(problem, configured(problem, **degrees))


def one_block_a_layer(shape: ModelShape) -> ModelShape:
    """The same model with attention and MLP in layers of their own, a norm each."""
    blocks = LayerBlocks(
        mixers=(Mixer.ATTENTION, Mixer.NONE) * shape.num_hidden_layers,
        has_mlp=(False, True) * shape.num_hidden_layers,
    )
    return replace(shape, num_hidden_layers=2 * shape.num_hidden_layers, norms_per_layer=1, blocks=blocks)


@pytest.mark.parametrize("degrees", DEGREES)
def test_attention_and_mlp_written_as_blocks_cost_the_same(degrees: dict[str, object]) -> None:
    layers = DENSE.num_hidden_layers
    written = replace(DENSE, blocks=LayerBlocks(mixers=(Mixer.ATTENTION,) * layers, has_mlp=(True,) * layers))
    assert priced(written, **degrees) == priced(DENSE, **degrees)


@pytest.mark.parametrize("degrees", DEGREES[:2])
def test_a_layer_split_into_its_blocks_costs_the_same(degrees: dict[str, object]) -> None:
    split, whole = priced(one_block_a_layer(DENSE), **degrees), priced(DENSE, **degrees)
    assert one_block_a_layer(DENSE).num_parameters == DENSE.num_parameters
    # Kernel launches and device work overlap within a layer, so that only the parts agree exactly.
    for part, seconds in whole.breakdown_s.items():
        if part != "kernel-launch overhead":
            assert split.breakdown_s[part] == pytest.approx(seconds, rel=1e-9), part
    assert split.step_s == pytest.approx(whole.step_s, rel=0.05)
    assert split.safe_bytes == pytest.approx(whole.safe_bytes, rel=1e-9)


def test_an_indexer_that_sees_everything_only_adds() -> None:
    layers = DENSE.num_hidden_layers
    plain = LayerBlocks(mixers=(Mixer.ATTENTION,) * layers, has_mlp=(True,) * layers)
    sees = replace(
        DENSE, blocks=replace(plain, indexer=SparseIndexer(num_heads=4, head_dim=64, top_k=4096, query_inputs=512))
    )
    picks = replace(
        DENSE, blocks=replace(plain, indexer=SparseIndexer(num_heads=4, head_dim=64, top_k=64, query_inputs=512))
    )
    attention = {shape: forward_flops_per_token(shape, 4096).attention for shape in (DENSE, sees, picks)}
    scores = 2.0 * layers * 2048 * 4 * 64
    assert attention[sees] == pytest.approx(attention[DENSE] + scores)
    assert attention[picks] < attention[sees]


def test_a_timed_recurrence_takes_the_time_of_its_kernel() -> None:
    """flash-linear-attention's gated delta rule on H100 updates 5.4e12 elements/s, a fifteenth of the peak in FLOPs;
    its backward pass takes 3.04 times as long (FlashQLA's published timings of it), not attention's 2.5."""
    assert HYBRID.blocks is not None
    assert HYBRID.blocks.recurrent is not None
    delta = replace(HYBRID.blocks.recurrent, kind="gated-delta")
    blocks = replace(HYBRID.blocks, mixers=(Mixer.RECURRENT,) * HYBRID.num_hidden_layers, recurrent=delta)
    device = replace(H100_FP8, slug="h100-sxm-80gb")
    problem = problem_of(replace(HYBRID, blocks=blocks), num_devices=8, machine=machine_with(8, device=device))
    config = configured(problem)
    kernel = recurrent_kernel("h100-sxm-80gb", "gated-delta", "sglang", PREFILL)
    assert kernel is not None
    tokens = 16 * 1024 / config.data_parallel
    expected = HYBRID.num_hidden_layers * tokens * delta.state_elements / kernel.elements_per_s * (1.0 + 3.04)
    assert price(problem, config).breakdown_s["attention"] == pytest.approx(expected)


def test_recurrent_layers_do_not_grow_with_the_sequence() -> None:
    short, long = (forward_flops_per_token(HYBRID, length) for length in (1024, 8192))
    assert HYBRID.blocks is not None
    assert HYBRID.blocks.recurrent is not None
    recurrence = HYBRID.num_recurrent_layers * HYBRID.blocks.recurrent.scan_flops_per_token
    assert long.attention - recurrence == pytest.approx(8 * (short.attention - recurrence))
    assert long.matrix == short.matrix


def test_latent_experts_move_and_multiply_less() -> None:
    assert MOE.moe is not None
    narrow = replace(MOE, moe=replace(MOE.moe, latent_size=MOE.hidden_size // 4))
    wide, less = (priced(shape, expert_parallel=4, data_parallel=4) for shape in (MOE, narrow))
    exchange = "expert-parallel communication"
    assert less.breakdown_s[exchange] < wide.breakdown_s[exchange] / 2  # a quarter of the bytes, the same latency
    assert less.breakdown_s["experts"] < wide.breakdown_s["experts"]
