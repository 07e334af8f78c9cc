"""Micro-batches between two sides, against a simulation that moves each of them through each stage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.serving.attention_ffn.pipeline import Stages, layers_s

SECONDS = st.floats(0.01, 10.0)


def simulated_s(times: tuple[float, ...], num_layers: int, micro_batches: int) -> float:
    """The end of the last micro-batch: each stage takes one at a time, in order of arrival."""
    free = [0.0] * len(times)
    ready = [0.0] * micro_batches
    for _ in range(num_layers):
        for number in range(micro_batches):
            for stage, seconds in enumerate(times):
                free[stage] = ready[number] = max(free[stage], ready[number]) + seconds
    return max(ready)


@settings(max_examples=60, deadline=None)
@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), st.integers(1, 12), st.integers(1, 5))
def test_the_closed_form_is_what_a_simulation_says(
    times: tuple[float, float, float, float], num_layers: int, micro_batches: int
) -> None:
    attention, sent, ffn, back = (np.array([seconds]) for seconds in times)
    stages = Stages(attention=attention, sent=sent, ffn=ffn, back=back)
    closed = float(layers_s(stages, num_layers, np.array([float(micro_batches)]))[0])
    assert closed == pytest.approx(simulated_s(times, num_layers, micro_batches))
