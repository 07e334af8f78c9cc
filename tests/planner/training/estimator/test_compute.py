"""Arithmetic of a layer: the limits of the GEMM curve, the halves and windows of attention, monotony."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, H100_FP8, MOE, compute_model_of, problem_of
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.constants.attention_kernels import TILE_KEYS, attention_kernel
from meshplan.catalogs.constants.training import Calibration, FrameworkRecipe
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.training.estimator.candidates import LayerKind
from meshplan.planner.training.estimator.operators.products import GemmCurve, gemm_curve, gemm_s, peak_flops_per_s
from meshplan.planner.training.problem.problem import Phase, TrainingProblem

CURVE = GemmCurve(rate_flops_per_s=800e12, bandwidth_bytes_per_s=3e12, inner_saturation=64.0, is_fitted=True)
LENGTHS = st.integers(1, 40_000)
DENSE_LAYER = LayerKind(is_moe=False, window=None)


def seconds(m: float, n: float, k: float, curve: GemmCurve = CURVE) -> float:
    array = (np.array([float(value)]) for value in (m, n, k))
    return float(gemm_s(curve, *array, efficiency=1.0, element_bytes=2.0)[0])


def test_a_large_product_runs_at_the_rate() -> None:
    side = 2.0**17
    assert seconds(side, side, side) == pytest.approx(2 * side**3 / CURVE.rate_flops_per_s, rel=1e-3)


def test_a_thin_product_runs_at_the_bandwidth() -> None:
    n, k = 16384, 16384
    moved = 2.0 * (k + k * n + n)
    slow = replace(CURVE, bandwidth_bytes_per_s=1e10)
    assert seconds(1, n, k, slow) == pytest.approx(moved / 1e10, rel=1e-3)


def test_products_of_32_bits_write_32_bits_and_narrow_ones_16() -> None:
    n, k, slow = 16384, 128, replace(CURVE, bandwidth_bytes_per_s=1e10)
    for element_bytes, written in ((4.0, 4.0), (2.0, 2.0), (1.0, 2.0)):
        sizes = (np.array([float(size)]) for size in (n, n, k))
        found = gemm_s(slow, *sizes, efficiency=1.0, element_bytes=element_bytes)
        moved = element_bytes * 2 * n * k + written * n * n
        assert float(found[0]) == pytest.approx(moved / slow.bandwidth_bytes_per_s, rel=1e-3)


def test_tiles_are_filled_whole() -> None:
    fast = replace(CURVE, bandwidth_bytes_per_s=1e30)
    assert seconds(1, 128, 4096, fast) == seconds(128, 128, 4096, fast)
    assert seconds(129, 128, 4096, fast) == pytest.approx(2 * seconds(128, 128, 4096, fast))


@given(m=LENGTHS, n=LENGTHS, k=LENGTHS, axis=st.integers(0, 2), more=st.integers(1, 5000))
def test_a_larger_product_is_never_faster(m: int, n: int, k: int, axis: int, more: int) -> None:
    larger = [m, n, k]
    larger[axis] += more
    assert seconds(*larger) >= seconds(m, n, k)


@given(m=LENGTHS, n=LENGTHS, k=LENGTHS)
def test_no_product_beats_the_rate_or_the_bandwidth(m: int, n: int, k: int) -> None:
    taken = seconds(m, n, k)
    assert taken >= 2 * m * n * k / CURVE.rate_flops_per_s
    assert taken >= 2 * (m * k + k * n + m * n) / CURVE.bandwidth_bytes_per_s
    tiles = 2 * -(-m // 128) * 128 * -(-n // 128) * 128 * (k + 64) / CURVE.rate_flops_per_s
    moved = 2 * (m * k + k * n + m * n) / CURVE.bandwidth_bytes_per_s
    assert taken <= tiles + moved


def test_fp8_is_not_slower_than_bf16_on_any_catalogued_device(catalog: Catalog) -> None:
    big = 16384.0
    for device in catalog.devices():
        if "fp8" not in device.peak_flops_per_s or "bf16" not in device.peak_flops_per_s:
            continue
        assert seconds(big, big, big, gemm_curve(device, "fp8")) <= seconds(big, big, big, gemm_curve(device, "bf16"))


def test_curves_stay_below_the_datasheet(catalog: Catalog) -> None:
    for device in catalog.devices():
        for precision in ("bf16", "fp16", "fp8", "fp32"):
            if precision in device.peak_flops_per_s:
                rate = gemm_curve(device, precision).rate_flops_per_s
                assert rate <= 1.02 * peak_flops_per_s(device, precision), f"{device.slug} {precision}"


def test_a_missing_precision_falls_back_to_what_the_device_has() -> None:
    a100 = replace(H100_FP8, peak_flops_per_s={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12})
    assert peak_flops_per_s(a100, "fp8") == 312e12
    assert peak_flops_per_s(a100, "mxfp8") == 312e12
    assert peak_flops_per_s(a100, "nvfp4") == 312e12
    assert peak_flops_per_s(a100, "fp32") == 19.5e12
    v100 = replace(a100, peak_flops_per_s={"fp16": 125e12, "fp32": 15.7e12})
    assert peak_flops_per_s(v100, "bf16") == 125e12


def test_causal_attention_is_half_of_full_beside_its_tiles() -> None:
    problem = problem_of(DENSE, sequence_length=4096)
    forward = compute_model_of(problem).attention_core(DENSE_LAYER).forward_s[0]
    kernel = attention_kernel("transformer-engine", "hopper").of_heads(DENSE.head_dim)
    rate = 989e12 * problem.calibration.time.attention_kernel_efficiency * kernel.forward_share
    a_key = 4.0 * 4096 * DENSE.num_attention_heads * DENSE.head_dim / rate
    assert forward == pytest.approx(a_key * (4096 / 2 + TILE_KEYS))


def test_a_window_costs_what_it_lets_through() -> None:
    problem = problem_of(DENSE, sequence_length=8192)
    model = compute_model_of(problem)

    def cost(window: int | None) -> float:
        return float(model.attention_core(LayerKind(is_moe=False, window=window)).total_s[0])

    assert cost(8192) == cost(100_000) == cost(None)
    assert cost(512) == pytest.approx(cost(None) * (512 - 512**2 / 16384 + TILE_KEYS) / (4096 + TILE_KEYS))
    assert cost(256) < cost(512) < cost(4096) < cost(None)


def test_flash_attention_computes_the_scores_again_and_stores_none() -> None:
    flash = problem_of(DENSE, sequence_length=4096)
    plain = replace(
        flash,
        calibration=Calibration(framework="any", architecture="any", recipe=FrameworkRecipe(flash_attention=False)),
    )
    fused, unfused = (compute_model_of(one).attention_core(DENSE_LAYER) for one in (flash, plain))
    kernel = attention_kernel("transformer-engine", "hopper")
    slower = kernel.forward_share / kernel.backward_share
    assert fused.backward_s[0] == pytest.approx(2.5 * slower * fused.forward_s[0])
    assert unfused.forward_s[0] > fused.forward_s[0]


def test_unbalanced_context_parallelism_waits_for_the_last_rank() -> None:
    balanced = problem_of(DENSE, sequence_length=4096)
    recipe = FrameworkRecipe(balances_context_parallel=False)
    skewed = replace(balanced, calibration=Calibration(framework="any", architecture="any", recipe=recipe))
    for context in (1, 2, 4):
        even = compute_model_of(balanced, context_parallel=context).attention_core(DENSE_LAYER).total_s[0]
        worst = compute_model_of(skewed, context_parallel=context).attention_core(DENSE_LAYER).total_s[0]
        assert worst == pytest.approx(even * (2 - 1 / context))


@pytest.mark.parametrize("degree", ["tensor_parallel", "context_parallel"])
def test_splitting_a_layer_over_more_devices_is_never_slower(degree: str) -> None:
    problem = problem_of(DENSE, sequence_length=8192)
    for work, layer in (("attention_projections", (DENSE_LAYER,)), ("head", ()), ("embedding", ())):
        times = [float(getattr(compute_model_of(problem, **{degree: d}), work)(*layer).total_s[0]) for d in (1, 2, 4)]
        assert times == sorted(times, reverse=True)


def test_lora_has_no_weight_gradients() -> None:
    whole, adapters = compute_model_of(problem_of(DENSE)), compute_model_of(problem_of(DENSE, phase=Phase.LORA))
    size = (np.array([4096.0]), np.array([4096.0]), np.array([4096.0]))
    assert whole.gemm(*size).backward_s == pytest.approx(2.0 * whole.gemm(*size).forward_s)
    assert adapters.gemm(*size).backward_s == pytest.approx(adapters.gemm(*size).forward_s)


def test_experts_do_the_work_of_the_visited_ones() -> None:
    """Large experts at full rate: k of E experts take k/E of the time of one dense product of all of them."""
    assert MOE.moe is not None
    problem = problem_of(MOE, sequence_length=131_072)
    cost = float(compute_model_of(problem).experts(MOE.moe).forward_s[0])
    constants, rate = problem.calibration.time, 0.76 * 989e12
    flops = 2.0 * 131_072 * 2 * 3 * MOE.hidden_size * MOE.moe.expert_intermediate_size
    assert cost == pytest.approx(
        flops / (rate * constants.gemm_efficiency * constants.expert_gemm_efficiency), rel=0.06
    )


def _more_bytes(problem: TrainingProblem, changed: TrainingProblem) -> float:
    """What the element-wise operators of a layer move more in their forward pass, bytes a token."""
    models = [compute_model_of(one) for one in (problem, changed)]
    before, after = (model.elementwise(DENSE_LAYER).forward_s[0] for model in models)
    rate = models[0].device.memory_bandwidth_bytes_per_s * models[0].calibration.time.memory_op_efficiency
    return float((after - before) * rate / models[0].tokens[0])


@pytest.mark.parametrize(("eager", "compiled", "each"), [(True, False, 36), (False, False, 4), (False, True, 0)])
def test_norms_of_queries_and_keys_move_what_their_operators_do(eager: bool, compiled: bool, each: int) -> None:
    """Operator by operator 36 bytes an element; a kernel of their own 2 + 2; joined to the rotation nothing more."""
    problem = problem_of(DENSE)
    recipe = replace(problem.calibration.recipe, is_fsdp=compiled)
    problem = replace(
        problem,
        workload=replace(problem.workload, is_eager=eager),
        calibration=replace(problem.calibration, recipe=recipe),
    )
    normed = replace(problem, shape=replace(problem.shape, qk_norm=True))
    elements = (DENSE.num_attention_heads + DENSE.num_key_value_heads) * DENSE.head_dim
    assert _more_bytes(problem, normed) == pytest.approx(each * elements, abs=1e-3)


@pytest.mark.parametrize(("eager", "each"), [(True, 36), (False, 4)])
def test_norms_behind_blocks_move_what_those_before_them_do(eager: bool, each: int) -> None:
    problem = problem_of(DENSE)
    problem = replace(problem, workload=replace(problem.workload, is_eager=eager))
    four, shared = (replace(problem, shape=replace(problem.shape, norms_per_layer=count)) for count in (4, 1))
    assert _more_bytes(problem, four) == pytest.approx(2 * each * DENSE.hidden_size, rel=1e-6)
    assert _more_bytes(problem, shared) == 0.0
