"""Lines of recurrences: the one behind the times is found; convolutions, and states that a cache held, are left out."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.catalogs.importers.perf_tables import Columns
from meshplan.catalogs.surfaces.recurrent import DECODE, PREFILL
from meshplan.profiler.shipped.fit_recurrent import UNCACHED_ELEMENTS, fitted, recurrence, updated_elements

START_S, RATE = 4e-6, 5e11


def table(phase: str, *, tokens: int = 1) -> Columns:
    """Sizes of one kernel with times of its line; those that a cache holds are ten times faster, convolutions free."""
    sizes = [(batch, heads) for batch in (1, 2, 16, 64, 256, 1024) for heads in (8, 16, 32)] * 2
    count = len(sizes)
    columns: Columns = {
        "kernel_source": np.array(["fused_recurrent"] * (count // 2) + ["causal_conv1d_update"] * (count // 2), object),
        "phase": np.array([phase] * count, object),
        "batch_size": np.array([batch for batch, _ in sizes], float),
        "seq_len": np.full(count, float(tokens)),
        "num_k_heads": np.full(count, 8.0),
        "num_v_heads": np.array([heads for _, heads in sizes], float),
        "head_k_dim": np.full(count, 128.0),
        "head_v_dim": np.full(count, 128.0),
    }
    elements = updated_elements(columns)
    cached = (phase == "generation") & (elements < UNCACHED_ELEMENTS)
    times = START_S + np.where(cached, 0.1, 1.0) * elements / RATE
    return columns | {"time_s": np.where(columns["kernel_source"] == "fused_recurrent", times, 1e-6)}


@pytest.mark.parametrize(("phase", "named", "tokens"), [(DECODE, "generation", 1), (PREFILL, "context", 4096)])
def test_the_line_behind_the_times_is_found(phase: str, named: str, tokens: int) -> None:
    line = fitted(recurrence(table(named, tokens=tokens), phase))
    assert line["elements_per_s"] == pytest.approx(RATE, rel=0.02)
    assert line["median_error"] < 0.02
    if phase == DECODE:  # launch-bound sizes pass a cache, too, up to 0.9 of a microsecond sooner
        assert START_S - 0.9e-6 <= line["start_s"] <= 1.01 * START_S
