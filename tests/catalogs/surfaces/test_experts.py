"""Experts: more tokens never cost less, physics bounds it from below, imbalance costs, extremes break nothing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.surfaces.experts import (
    ELEMENT_BYTES,
    SURFACES,
    ExpertShape,
    ExpertSurface,
    FastestExperts,
    distinct_experts,
    expert_features,
    expert_surface,
    experts_of_law,
    load_of_fullest,
)

KEYS = sorted(SURFACES.rows)
DEEPSEEK_V3 = ExpertShape(7168, 2048, top_k=8, num_experts=256)
UNHEARD_OF = ExpertShape(5632, 1234, top_k=7, num_experts=96)
TOKENS = np.unique(np.geomspace(1, 1e6, 200).round())


def over(devices: int, shape: ExpertShape = DEEPSEEK_V3) -> ExpertShape:
    return shape._replace(expert_parallel=devices)


def surface(key: tuple[str, str, str]) -> ExpertSurface:
    found = expert_surface(*key)
    assert isinstance(found, ExpertSurface)
    return found


@pytest.mark.parametrize("key", KEYS)
def test_more_tokens_never_cost_less(key: tuple[str, str, str]) -> None:
    for model, devices, skew in product((DEEPSEEK_V3, UNHEARD_OF), (1, 8, 32), (0.0, 0.5, 1.01, 1.2)):
        times = surface(key).time_s(TOKENS, over(devices, model), skew=skew)
        assert (np.diff(times) >= -1e-9 * times[1:]).all()
        assert times[-1] > 20 * times[0]


@pytest.mark.parametrize("key", KEYS)
def test_nothing_breaks_at_the_extremes(key: tuple[str, str, str]) -> None:
    for hidden, size, top_k, experts, devices, skew in product(
        (64, 65536), (1, 65536), (1, 64), (64, 4096), (1, 64), (0.0, 3.0)
    ):
        times = surface(key).time_s(
            [0, 1, 1e9],
            ExpertShape(hidden, size, top_k, experts, devices),
            skew=skew,
        )
        assert np.isfinite(times).all()
        assert (times > 1e-7).all()


@pytest.mark.parametrize("key", KEYS)
def test_no_faster_than_the_memory_or_the_peak(key: tuple[str, str, str], catalog: Catalog) -> None:
    device, quantization, _ = key
    facts = catalog.device(device)
    model = ExpertShape(4096, 1536, top_k=8, num_experts=128)
    fewest, decode, prefill = surface(key).time_s([16, 256, 16384], model)  # balanced, 16 tokens hit every expert
    weights = 3 * 128 * 4096 * 1536 * ELEMENT_BYTES[quantization]
    assert weights / min(fewest, decode) < 1.05 * facts.memory_bandwidth_bytes_per_s
    assert 2 * 3 * 8 * 16384 * 4096 * 1536 / prefill < max(facts.peak_flops_per_s.values())


@pytest.mark.parametrize("key", KEYS)
def test_imbalance_costs(key: tuple[str, str, str]) -> None:
    balanced, skewed = (surface(key).time_s(16384, over(32), skew=skew) for skew in (0.0, 1.2))
    assert skewed > 1.15 * balanced
    doubled = surface(key).time_s(16384, over(32), load_factor=2.0)
    assert doubled == pytest.approx(surface(key).time_s(32768, over(32)))


@pytest.mark.parametrize("key", KEYS)
def test_devices_share_the_work(key: tuple[str, str, str]) -> None:
    one, eight = (surface(key).time_s(16384, over(devices)) for devices in (1, 8))
    assert eight < 0.5 * one


def test_any_framework_is_the_fastest_of_all() -> None:
    fastest = expert_surface("h200-sxm-141gb", "fp8_block")
    assert isinstance(fastest, FastestExperts)
    times = fastest.time_s(TOKENS, over(8))
    for one in fastest.surfaces:
        assert (times <= one.time_s(TOKENS, over(8))).all()


def test_a_published_row() -> None:
    # The table itself: H200, TensorRT-LLM 1.3.0rc20, fp8_block, DeepSeek-V3 over 8 devices, balanced: 64 tokens 361 µs,
    # 16384 tokens 2499 µs.
    found = surface(("h200-sxm-141gb", "fp8_block", "trtllm"))
    times = found.time_s([64, 16384], over(8))
    np.testing.assert_allclose(times, [361e-6, 2499e-6], rtol=0.15)


def test_a_published_row_of_an_older_release() -> None:
    # Qwen3-235B's experts over 8 H100 in 16 bits, power law 1.01, 64 tokens: vLLM 0.12.0 273 µs, 0.24.0 228 µs.
    older, newest = (
        surface(("h100-sxm-80gb", "bfloat16", framework)).time_s(
            [64], ExpertShape(4096, 1536, top_k=8, num_experts=128, expert_parallel=8), skew=1.01
        )
        for framework in ("vllm-2025", "vllm")
    )
    np.testing.assert_allclose([older[0], newest[0]], [273e-6, 228e-6], rtol=0.1)


sizes = st.integers(0, 8).map(lambda power: 2.0**power)


@given(st.integers(1, 10**6), st.integers(1, 16), sizes, st.floats(1.01, 1.9))
def test_the_load_of_the_fullest_stays_between_its_bounds(tokens: int, top_k: int, devices: float, skew: float) -> None:
    experts = 256.0
    columns = (np.array([value], dtype=float) for value in (tokens, top_k, experts, devices, skew))
    load = load_of_fullest(*columns)
    assert 1.0 <= load <= max(devices, 1.0)


def test_the_load_of_the_fullest_agrees_with_draws_from_the_law() -> None:
    random = np.random.default_rng(1)
    for devices, skew in ((4, 1.01), (8, 1.2), (32, 1.01)):
        tokens, top_k, experts = 4096.0, 8.0, 256
        low, high = 1.0, 0.8 * tokens
        uniform = random.random((4000, experts))
        loads = ((high ** (1 - skew) - low ** (1 - skew)) * uniform + low ** (1 - skew)) ** (1 / (1 - skew))
        by_device = loads.reshape(4000, devices, -1).sum(axis=2)
        drawn = (by_device.max(axis=1) * devices / loads.sum(axis=1)).mean()
        columns = (np.array([value], dtype=float) for value in (tokens, top_k, experts, devices, skew))
        assert load_of_fullest(*columns) == pytest.approx(drawn, rel=0.25)


def drawn_experts(tokens: int, top_k: int, experts: int, skew: float, random: np.random.Generator) -> int:
    """Experts with a token, by the collector's own steps: draw loads, make them add up, round, settle the rest."""
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    rest = 1.0 - skew
    loads = ((high**rest - low**rest) * random.random(experts) + low**rest) ** (1.0 / rest)
    counts = np.rint(loads / loads.sum() * tokens * top_k).astype(int)
    order, missing = np.argsort(-counts, kind="stable"), tokens * top_k - counts.sum()
    for turn in range(abs(missing)):
        expert = order[turn % experts] if missing > 0 else order[-(turn % experts) - 1]
        expert = expert if missing > 0 or counts[expert] else np.argmax(counts)
        counts[expert] += np.sign(missing)
    return int((counts > 0).sum())


@pytest.mark.parametrize(("top_k", "experts"), [(8, 128), (8, 256), (4, 128), (2, 8)])
@pytest.mark.parametrize("skew", [1.01, 1.2])
def test_the_experts_of_the_law_agree_with_draws_from_it(top_k: int, experts: int, skew: float) -> None:
    random = np.random.default_rng(2)
    tokens = np.array([1, 2, 4, 8, 16, 32, 64, 128, 512])
    drawn = [np.mean([drawn_experts(number, top_k, experts, skew, random) for _ in range(100)]) for number in tokens]
    columns = (np.full(len(tokens), float(value)) for value in (top_k, experts, skew))
    found = experts_of_law(tokens.astype(float), *columns)
    np.testing.assert_allclose(found, drawn, rtol=0.12, atol=1.0)
    least = distinct_experts(tokens.astype(float), top_k=top_k, num_experts=experts)
    assert (found[tokens == experts // top_k] < 0.75 * least[tokens == experts // top_k]).all() or experts == 8


@pytest.mark.parametrize("key", KEYS)
def test_tokens_that_choose_by_themselves_read_more_weights_than_the_law_s(key: tuple[str, str, str]) -> None:
    table, chosen = (
        surface(key).time_s([1, 16, 32, 16384], over(8), skew=1.01, by_choice=by_choice) for by_choice in (False, True)
    )
    assert (chosen >= table * (1.0 - 1e-12)).all()
    assert (chosen[1:3] > 1.02 * table[1:3]).all() == (not surface(key).has_balanced)
    assert chosen[-1] == pytest.approx(table[-1], rel=0.05)  # all experts are read


def test_balanced_routing_deals_the_tokens_out() -> None:
    shape = tuple(np.array([float(value)]) for value in (4096, 1024, 8, 64, 1, 3))
    few = expert_features(np.array([4.0]), shape, np.zeros(1))
    many = expert_features(np.array([64.0]), shape, np.zeros(1))
    assert few.active == 32
    assert many.active == 64
    assert many.pairs == 512


def test_held_out_errors_are_stated_and_small() -> None:
    found = [surface(key) for key in KEYS]
    median, p90, new = (
        np.array([getattr(one, name) for one in found])
        for name in ("median_error", "p90_error", "new_shape_median_error")
    )
    assert (median > 0).all()
    assert median.max() < 0.1
    assert (median < 0.05).mean() > 0.85
    assert (p90 < 0.15).mean() > 0.6
    assert np.median(new) < 0.15


def test_no_surface_for_what_was_not_measured() -> None:
    assert expert_surface("mi300x", "bfloat16") is None
    assert expert_surface("a100-sxm-80gb", "nvfp4", "trtllm") is None
