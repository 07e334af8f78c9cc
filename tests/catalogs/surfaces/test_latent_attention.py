"""Latent attention: more work never costs less, memory bounds it from below, nothing breaks at the extremes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.surfaces.latent_attention import SURFACES, latent_attention_surface

KEYS = [key[:3] for key in sorted(SURFACES.rows)]
STEPS = np.unique(np.geomspace(1, 1e6, 100).round())


@pytest.mark.parametrize("key", KEYS)
def test_more_work_never_costs_less(key: tuple[str, str, str]) -> None:
    _, phase, _ = key
    found = latent_attention_surface(*key)
    assert found is not None
    for kv_dtype in found.tables:
        kinds = {"kv_dtype": kv_dtype}
        new = 1 if phase == "decode" else 300
        times = [found.time_s(batch=STEPS, context=500, num_heads=16, new_tokens=new, **kinds)]
        if phase == "decode":
            times.append(found.time_s(batch=64, context=STEPS, num_heads=128, **kinds))
        else:
            times.append(found.time_s(batch=1, context=0, num_heads=128, new_tokens=STEPS, **kinds))
            times.append(found.time_s(batch=2, context=STEPS, num_heads=16, new_tokens=256, **kinds))
        for series in times:
            assert (np.diff(series) >= -1e-9 * series[1:]).all()
            assert series[-1] > 2.0 * series[0]


@pytest.mark.parametrize("key", KEYS)
def test_nothing_breaks_at_the_extremes(key: tuple[str, str, str]) -> None:
    found = latent_attention_surface(*key)
    assert found is not None
    for batch, context, heads, new, kv_dtype in product((1, 1e5), (0, 1e8), (1, 512), (1, 1e6), ("bf16", "fp8", "x")):
        time_s = found.time_s(batch=batch, context=context, num_heads=heads, new_tokens=new, kv_dtype=kv_dtype)
        assert np.isfinite(time_s)
        assert time_s > 1e-7


@pytest.mark.parametrize("key", [key for key in KEYS if key[1] == "decode"])
def test_no_faster_than_the_memory(key: tuple[str, str, str], catalog: Catalog) -> None:
    found = latent_attention_surface(*key)
    assert found is not None
    time_s = found.time_s(batch=128, context=16384, num_heads=16, kv_dtype=next(iter(found.tables)))
    assert 128 * 16384 * 576 * 2 / time_s < 1.02 * catalog.device(key[0]).memory_bandwidth_bytes_per_s


def test_held_out_errors_are_stated_and_small() -> None:
    tables = []
    for key in KEYS:
        found = latent_attention_surface(*key)
        assert found is not None
        tables += list(found.tables.values())
    median, p90 = np.array([(table.median_error, table.p90_error) for table in tables]).T
    assert (median > 0).all()
    assert median.max() < 0.12
    assert (median < 0.05).mean() > 0.9
    assert (p90 < 0.15).mean() > 0.7


def test_no_surface_for_what_was_not_measured() -> None:
    assert latent_attention_surface("mi300x", "decode") is None
    assert latent_attention_surface("h200-sxm-141gb", "decode", "vllm") is None  # its tables time the whole block
