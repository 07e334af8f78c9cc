"""Attention: more work never costs less, physics bounds it from below, chunks add up, extremes break nothing."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.surfaces.attention import SURFACES, AttentionSurface, attention_surface, equivalent_prefill
from meshplan.catalogs.surfaces.time_tables import TablesByKey, TimeTable

KEYS = sorted(SURFACES.rows)
LLAMA_70B = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128}  # of one device out of eight
QWEN_14B = {"num_heads": 20, "num_kv_heads": 4, "head_dim": 128}


def surface(key: tuple[str, str, str]) -> AttentionSurface:
    found = attention_surface(*key)
    assert found is not None
    return found


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("window", [0, 128, 1000])
def test_more_work_never_costs_less(key: tuple[str, str, str], kv_dtype: str, window: int) -> None:
    found = surface(key)
    new = 1 if key[1] == "decode" else 512
    steps = np.unique(np.geomspace(1, 2e6, 120).round())

    def rises(times: np.ndarray) -> bool:
        return bool((np.diff(times) >= -1e-9 * times[1:]).all())

    for sizes in (LLAMA_70B, QWEN_14B):
        common = {**sizes, "window": window, "kv_dtype": kv_dtype}
        assert rises(found.time_s(batch=steps, context=700, new_tokens=new, **common))
        if key[1] == "decode":
            assert rises(found.time_s(batch=8, context=steps, **common))
        else:
            assert rises(found.time_s(batch=2, context=0, new_tokens=steps, **common))


@pytest.mark.parametrize("key", [key for key in KEYS if key[1] == "prefill"])
def test_a_chunk_after_more_context_costs_more(key: tuple[str, str, str]) -> None:
    context = np.geomspace(1, 1e6, 30).round()
    for new in (1, 64, 512, 4096):
        times = surface(key).time_s(batch=1, context=context, new_tokens=new, **LLAMA_70B)
        assert (np.diff(times) >= -1e-9 * times[1:]).all()
        assert times[-1] > 5.0 * times[0]


@pytest.mark.parametrize("key", KEYS)
def test_nothing_breaks_at_the_extremes(key: tuple[str, str, str]) -> None:
    requests = product((1, 1e5), (0, 1e8), ((1, 1), (128, 8)), (16, 1024), (1, 1e6), (0, 1, 4096))
    batch, context, heads, width, new, window = zip(*requests, strict=True)
    num_heads, num_kv_heads = zip(*heads, strict=True)
    for kv_dtype in ("bf16", "fp8", "nvfp4"):
        times = surface(key).time_s(
            batch=batch,
            context=context,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=width,
            new_tokens=new,
            window=window,
            kv_dtype=kv_dtype,
        )
        assert np.isfinite(times).all()
        assert (times > 1e-7).all()


@pytest.mark.parametrize("key", KEYS)
def test_no_faster_than_the_memory_or_the_peak(key: tuple[str, str, str], catalog: Catalog) -> None:
    device, phase, _ = key
    facts = catalog.device(device)
    if phase == "decode":
        time_s = surface(key).time_s(batch=128, context=16384, num_heads=32, num_kv_heads=8, head_dim=128)
        assert 2 * 2 * 128 * 16384 * 8 * 128 / time_s < 1.02 * facts.memory_bandwidth_bytes_per_s
    else:
        time_s = surface(key).time_s(batch=4, context=0, new_tokens=16384, num_heads=32, num_kv_heads=8, head_dim=128)
        assert 2 * 4 * 16384**2 * 32 * 128 / time_s < facts.peak_flops_per_s["bf16"]


@pytest.mark.parametrize("framework", ["trtllm", "vllm", "sglang"])
@pytest.mark.parametrize("device", ["h100-sxm-80gb", "b200-sxm-180gb"])
def test_the_context_matters_in_decode(device: str, framework: str) -> None:
    short, long = surface((device, "decode", framework)).time_s(batch=64, context=[128, 4000], **LLAMA_70B)
    assert long > 1.5 * short


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "b300", "gb200", "gb300"])
def test_a_smaller_cache_is_not_slower_where_bytes_decide(device: str) -> None:
    found = surface((device, "decode", "trtllm"))
    request = {"batch": 128, "context": [4096, 16384, 65536], "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    assert (found.time_s(**request, kv_dtype="fp8") < 1.05 * found.time_s(**request, kv_dtype="bf16")).all()


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "b200-sxm-180gb"])
@pytest.mark.parametrize(("window", "tolerance"), [(0, 0.1), (1024, 0.35)])  # a short window starves a chunk of work
def test_chunks_add_up_to_the_whole(device: str, window: int, tolerance: float) -> None:
    found = surface((device, "prefill", "trtllm"))

    def time_s(context: float, new: float) -> float:
        # Enough heads to fill the device with a chunk.
        sizes = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "window": window}
        return float(found.time_s(batch=1, context=context, new_tokens=new, **sizes))

    chunks = sum(time_s(4096 * index, 4096) for index in range(4))
    assert chunks == pytest.approx(time_s(0, 16384), rel=tolerance)


def test_a_window_saves_time() -> None:
    found = surface(("h200-sxm-141gb", "prefill", "trtllm"))
    full, windowed = found.time_s(batch=1, context=0, new_tokens=16384, window=[0, 128], **LLAMA_70B)
    assert windowed < 0.2 * full


counts = st.integers(1, 10**5).map(float)


@given(counts, st.integers(0, 10**6).map(float), counts, st.one_of(st.just(np.inf), counts))
def test_the_equivalent_prefill_has_as_many_queries_and_positions(
    units: float, before: float, new: float, reach: float
) -> None:
    flat = (np.array([value]) for value in (units, before, new, reach))
    equal_units, attended, spread = equivalent_prefill(*flat)
    length = attended * spread
    assert length >= 1.0
    assert length <= (2.0 * before + new) * (1.0 + 1e-9)
    pairs = length * attended - 0.5 * attended * (attended - 1.0)
    whole = np.minimum(before + np.arange(1.0, new + 1.0), reach).sum()
    assert equal_units * pairs == pytest.approx(units * whole)
    if length < 0.999 * (before + new) or np.isinf(reach):
        assert equal_units * length == pytest.approx(units * new)


def test_published_decode_bandwidth() -> None:
    # The table itself: H200, TensorRT-LLM, batch 128, 64 heads, 8 KV heads of 128, 16384 positions, bf16.
    found = surface(("h200-sxm-141gb", "decode", "trtllm"))
    time_s = found.time_s(batch=128, context=16383, num_heads=64, num_kv_heads=8, head_dim=128)
    rate = 2 * 2 * 128 * 16384 * 8 * 128 / float(time_s)
    assert 0.75 * 4.8e12 < rate < 4.8e12


def test_held_out_errors_are_stated_and_small() -> None:
    errors = [(table.median_error, table.p90_error) for key in KEYS for table in surface(key).tables.values()]
    median, p90 = np.array(errors).T
    assert (median > 0).all()
    assert median.max() < 0.12
    assert (median < 0.05).mean() > 0.85
    assert (p90 < 0.15).mean() > 0.6


def test_no_surface_for_what_was_not_measured() -> None:
    assert attention_surface("mi300x", "decode") is None
    assert attention_surface("a100-sxm-80gb", "decode", "tgi") is None


def test_any_framework_is_one_that_was_measured() -> None:
    found = attention_surface("h100-sxm-80gb", "decode")
    assert found is not None
    assert found.framework == "trtllm"


def test_a_table_is_made_when_it_is_asked_for_and_once() -> None:
    whole = surface(KEYS[0]).tables
    made: list[int] = []

    def make(row: Mapping[str, Any]) -> TimeTable:
        made.append(row["number"])
        return whole[next(iter(whole))]

    tables = TablesByKey({"a": {"number": 1}, "b": {"number": 2}}, make)
    assert list(tables) == ["a", "b"]
    assert "b" in tables
    assert made == []
    assert tables["b"] is tables["b"]
    assert made == [2]
