"""Layers that are not softmax attention and an MLP: the same work written in another way has the same price."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, H100_FP8, HYBRID, MOE, configured, machine_with, problem_of

from meshplan.catalogs.constants.training import TimeConstants
from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers.gated_delta import read as read_gated_delta
from meshplan.catalogs.models.layers.recurrent import LayerBlocks, Mixer, SparseIndexer
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.surfaces.recurrent import PREFILL, recurrent_kernel
from meshplan.planner.training.estimator import layer_time
from meshplan.planner.training.estimator.flops import forward_flops_per_token
from meshplan.planner.training.estimator.operators import recurrent
from meshplan.planner.training.estimator.operators.recurrent import copied_elements, launches_ratio
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


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("degrees", DEGREES[:2])
def test_a_layer_split_into_its_blocks_costs_the_same(degrees: dict[str, object], ahead: int) -> None:
    """Also where a further layer of both predicts further tokens."""
    model = replace(DENSE, num_nextn_predict_layers=ahead)
    split, whole = priced(one_block_a_layer(model), **degrees), priced(model, **degrees)
    assert one_block_a_layer(model).num_parameters == model.num_parameters
    assert one_block_a_layer(model).nextn_layer_parameters == model.nextn_layer_parameters
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


def test_a_scan_that_was_not_timed_gains_less_from_a_device_than_its_peak() -> None:
    """Chunks of a Mamba-2 scan follow one another: with twice the peak it is a third faster at most."""
    assert HYBRID.blocks is not None
    shape = replace(
        HYBRID, blocks=replace(HYBRID.blocks, mixers=(Mixer.RECURRENT,) * 6, has_mlp=(False,) * 6), norms_per_layer=1
    )
    twice = replace(H100_FP8, peak_flops_per_s={name: 2.0 * rate for name, rate in H100_FP8.peak_flops_per_s.items()})
    problems = [problem_of(shape, machine=machine_with(8, device=device)) for device in (H100_FP8, twice)]
    slow, fast = (price(problem, configured(problem)).breakdown_s["attention"] for problem in problems)
    assert slow / fast == pytest.approx(1.32, rel=1e-3)


@pytest.mark.parametrize("shape", [DENSE, MOE])
def test_a_layer_split_into_its_blocks_takes_the_host_as_long(shape: ModelShape) -> None:
    """What a layer with experts takes the host more than a dense one is its experts', not half its attention's."""
    only_host = TimeConstants(host_s_per_layer=5.0, host_s_per_moe_layer=19.0)

    def step_s(model: ModelShape) -> float:
        problem = problem_of(model)
        problem = replace(problem, calibration=replace(problem.calibration, time=only_host))
        return price(problem, configured(problem)).step_s

    split = one_block_a_layer(shape)
    if shape.moe is not None:
        flags = tuple(flag for own in shape.moe.moe_layers for flag in (False, own))
        split = replace(split, moe=replace(shape.moe, moe_layers=flags))
    assert step_s(split) == pytest.approx(step_s(shape), rel=1e-3)


def test_a_gated_delta_rule_launches_three_times_as_much_as_attention_and_copies() -> None:
    """Qwen3-Next's mixer, by hand: 2·8,192 elements that are convolved, 4·2,048 of keys, 10·4,096 of values."""
    mixer = read_gated_delta(
        ConfigFields(
            {
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
            },
            {},
        ),
        2048,
    )
    assert copied_elements(mixer) == 2 * 8192 + 4 * 2048 + 10 * 4096
    assert launches_ratio(mixer) == pytest.approx(3.2)
    assert HYBRID.blocks is not None
    assert HYBRID.blocks.recurrent is not None
    assert copied_elements(HYBRID.blocks.recurrent) == 0  # Mamba-2's is one function
    assert launches_ratio(replace(HYBRID.blocks.recurrent, kind="another")) == 1.0


def test_launches_of_a_mixer_take_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    only_host = TimeConstants(host_s_per_layer=5.0)
    problem = problem_of(HYBRID)
    problem = replace(problem, calibration=replace(problem.calibration, time=only_host))
    fifteen = price(problem, configured(problem)).step_s
    monkeypatch.setitem(recurrent.LAUNCHES, "mamba-2", recurrent.ATTENTION_LAUNCHES)
    layer_time._Known.latest = layer_time._Known()
    ten = price(problem, configured(problem)).step_s
    assert fifteen / ten == pytest.approx((8 + 3 * 0.5) / 8, rel=1e-3)  # eight blocks, of which three are Mamba-2


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


def test_a_further_prediction_joins_two_hidden_states() -> None:
    """Beside one more layer and a head it multiplies 2h by h, forward and twice backward."""
    one, none = (priced(replace(DENSE, num_nextn_predict_layers=ahead)) for ahead in (1, 0))
    products = "matrix products"
    layer = none.breakdown_s[products] / DENSE.num_hidden_layers
    joined = one.breakdown_s[products] - none.breakdown_s[products] - layer
    h, gated = DENSE.hidden_size, 3 * DENSE.intermediate_size * DENSE.hidden_size
    attention = 2 * h * (DENSE.num_attention_heads + DENSE.num_key_value_heads) * DENSE.head_dim
    assert joined == pytest.approx(layer * 2 * h**2 / (gated + attention), rel=0.15)  # products of like rates
