"""Smooth curves: exact on a quiet line, calmer than a zigzag, and the left-out errors of the textbook's closed form."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.profiler.fitting.curve_fit import left_out_error, smoothed_time_s

SIZES = 2.0 ** np.arange(9, 30)


@settings(deadline=None, max_examples=25)
@given(latency=st.floats(1e-6, 1e-3), bandwidth=st.floats(1e9, 1e12))
def test_a_line_stays_a_line(latency: float, bandwidth: float) -> None:
    times = latency + SIZES / bandwidth
    np.testing.assert_allclose(smoothed_time_s(SIZES, times, SIZES), times, rtol=1e-3)
    between = np.sqrt(SIZES[1:] * SIZES[:-1])
    np.testing.assert_allclose(smoothed_time_s(SIZES, times, between), latency + between / bandwidth, rtol=1e-3)


def test_a_zigzag_is_calmed_and_a_change_of_protocol_is_followed() -> None:
    line = 10e-6 + SIZES / 4e11
    zigzag = np.where(np.arange(len(SIZES)) % 2, 1.15, 1 / 1.15)
    calmed = smoothed_time_s(SIZES, line * zigzag, SIZES)
    assert np.abs(np.log(calmed / line)).max() < 0.5 * np.log(1.15)
    # Half the speed from 1 MiB to 64 MiB, as a library that changes its algorithm too late has it.
    stepped = line * np.where((SIZES >= 2**20) & (SIZES <= 2**26), 2.0, 1.0)
    assert np.median(np.abs(smoothed_time_s(SIZES, stepped, SIZES) / stepped - 1.0)) < 0.05


def test_a_left_out_point_takes_no_part_in_its_own_prediction() -> None:
    quiet = 10e-6 + SIZES / 4e11
    spoiled = quiet.copy()
    spoiled[10] *= 3.0
    # Were it seen, its own error would be small. As it is, one error in 19 is two thirds, and the median stays.
    error = left_out_error(SIZES, spoiled)
    assert error.num_points == len(SIZES) - 2
    only = smoothed_time_s(np.delete(SIZES, 10), np.delete(spoiled, 10), SIZES[10])
    assert abs(only / spoiled[10] - 1 / 3) < 0.01
    assert error.median < 0.1
