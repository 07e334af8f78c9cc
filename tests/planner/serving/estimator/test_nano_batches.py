"""Nano-batches that overlap: closed forms, what can never be, and NanoFlow's own times and figures."""

from __future__ import annotations

import pytest
from asked_worker import worker_of
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.estimator.bounds.nano_batches import (
    COMPUTE,
    INTERFERENCE,
    MEMORY,
    NETWORK,
    nano_batches,
    overlapped_s,
    steady_nano_batches,
)

# NanoFlow, Table 2: measured milliseconds of Llama-2-70B on eight A100, 2,048 tokens in a batch, all layers.
PRODUCTS = 16.08 + 16.01 + 69.92 + 34.96
PROMPTS, DECODES, COLLECTIVES = 4.56, 35.60, 47.92
# Section 6.4: what cutting batches costs without overlap.
CUT = 0.132
TIMES = st.floats(min_value=0.0, max_value=10.0)


def test_nanoflows_times_give_nanoflows_rate() -> None:
    """With its measured times, its table and what it says that cutting costs: 1,286 tokens/s/GPU, to 5 %."""
    seconds = {COMPUTE: PRODUCTS + PROMPTS, MEMORY: DECODES, NETWORK: COLLECTIVES}
    milliseconds = overlapped_s(seconds) / (1.0 - CUT)
    assert 2048 / milliseconds * 1e3 / 8 == pytest.approx(1286, rel=0.05)


@given(compute=TIMES, memory=TIMES, network=TIMES, more=TIMES)
def test_overlap_lies_between_the_longest_and_all_and_more_work_is_never_faster(
    compute: float, memory: float, network: float, more: float
) -> None:
    seconds = {COMPUTE: compute + 0.01, MEMORY: memory, NETWORK: network}
    found = overlapped_s(seconds)
    assert max(seconds.values()) <= found * (1.0 + 1e-9)
    assert found <= sum(seconds.values()) * (1.0 + 1e-9)
    for kind, alone in seconds.items():
        assert overlapped_s({**seconds, kind: alone + more}) >= found * (1.0 - 1e-9)


def test_kernels_beside_products_take_less_from_them_than_they_do() -> None:
    for shares, speeds in INTERFERENCE.values():
        assert all(speed >= share for share, speed in zip(shares, speeds, strict=True))
        assert sorted(shares) == list(shares)
        assert sorted(speeds) == list(speeds)


def test_large_batches_gain_and_small_ones_do_not(catalog: Catalog) -> None:
    """2,048 tokens: NanoFlow's is 1.20 times as fast as one kernel after the other. A few: weights are read twice."""
    kind = worker_of(catalog, "llama-2-70b", "dgx-a100-80gb", 8)
    large = nano_batches(kind.worker, decodes=1024.0, context=768.0, prompt_tokens=1024.0)
    assert large.speedup == pytest.approx(1.20, abs=0.08)
    small = nano_batches(kind.worker, decodes=8.0, context=768.0, prompt_tokens=0.0)
    assert small.speedup == 1.0
    assert small.overlapped_s > small.sequential_s


def test_what_is_said_of_a_worker_is_of_its_steady_iteration(catalog: Catalog) -> None:
    kind = worker_of(catalog, "llama-2-70b", "dgx-a100-80gb", 8)
    found = steady_nano_batches(kind.worker, num_running=100.0)
    context = (kind.worker.contexts.least + kind.worker.contexts.most) / 2.0
    assert found is not None
    assert found == nano_batches(kind.worker, decodes=100.0, context=context, prompt_tokens=100.0)
