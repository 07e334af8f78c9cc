"""Timed recurrences: what ships stays inside what memory allows, and near rows of the published tables."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.surfaces.recurrent import DECODE, KERNELS, PREFILL, recurrent_kernel

LEAST_STATE_BYTES = 2.0  # of an element; TensorRT-LLM's tables are faster than 4 bytes allow


def test_no_kernel_moves_states_faster_than_the_memory() -> None:
    catalog = Catalog.open("sqlite://")
    for device, kind, framework, phase in KERNELS.rows:
        kernel = recurrent_kernel(device, kind, framework, phase)
        assert kernel is not None
        assert kernel.start_s > 0.0
        if phase == DECODE:
            moved = 2.0 * LEAST_STATE_BYTES * kernel.elements_per_s
            assert moved < catalog.device(device).memory_bandwidth_bytes_per_s


def test_prompts_are_cheaper_by_the_token_than_decodes() -> None:
    """A chunk reads and writes its state once for all of its tokens."""
    for device, kind, framework, phase in KERNELS.rows:
        decode, prefill = (recurrent_kernel(device, kind, framework, name) for name in (DECODE, PREFILL))
        assert phase == DECODE or (decode is not None and prefill is not None)
        if prefill is not None and decode is not None:
            assert prefill.elements_per_s > 5.0 * decode.elements_per_s


# Rows of aiconfigurator-core 0.12.0, gdn_perf and kda_perf: sequences or tokens, heads of 128 × 128, µs.
ROWS = [
    ("b200-sxm-180gb", "gated-delta", "vllm", DECODE, 256, 64, 331.3),
    ("h100-sxm-80gb", "gated-delta", "sglang", DECODE, 256, 64, 714.8),
    ("b200-sxm-180gb", "kimi-delta", "vllm", DECODE, 256, 96, 559.3),
    ("h100-sxm-80gb", "gated-delta", "trtllm", PREFILL, 8192, 64, 942.0),
    ("b200-sxm-180gb", "gated-delta", "sglang", PREFILL, 8192, 64, 886.0),
]


@pytest.mark.parametrize(("device", "kind", "framework", "phase", "tokens", "heads", "measured_us"), ROWS)
def test_kernels_are_near_published_rows(
    device: str, kind: str, framework: str, phase: str, tokens: int, heads: int, measured_us: float
) -> None:
    kernel = recurrent_kernel(device, kind, framework, phase)
    assert kernel is not None
    predicted = kernel.time_s(np.array(float(tokens * heads * 128 * 128)))
    assert 1e6 * predicted == pytest.approx(measured_us, rel=0.1 if phase == DECODE else 0.3)


def test_what_was_not_timed_has_no_kernel() -> None:
    assert recurrent_kernel("b200-sxm-180gb", "mamba-2", "vllm", DECODE) is None
    assert recurrent_kernel("b200-sxm-180gb", "gated-delta", "llamacpp", DECODE) is None
