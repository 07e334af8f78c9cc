"""The formula of an exchange: its properties, and a simulation of sites and a link that knows nothing of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.far_apart.exchange import Exchange, Ring

SECONDS = st.floats(0.01, 10.0)
RATES = st.floats(1e6, 1e12)
SITES = st.integers(2, 8)
SIZES = st.floats(1e3, 1e12)


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    count = draw(st.integers(1, 4))
    rounds = draw(st.integers(1, 10))
    return Exchange(
        sync_steps=count * rounds,
        fragment_bytes=tuple(draw(SIZES) for _ in range(count)),
        overlap_steps=draw(st.integers(0, rounds - 1)),
        is_gathered=draw(st.booleans()),
        compute_s=draw(st.sampled_from((0.0, 0.5))),
        whole_share=draw(st.sampled_from((0.0, 0.2))),
        whole_bytes=draw(SIZES),
    )


rings = st.builds(Ring, num_sites=SITES, bytes_per_s=RATES, latency_s=st.floats(0.0, 0.2))


def simulated(exchange: Exchange, steps_s: tuple[float, ...], ring: Ring, periods: int) -> float:
    """Time of sites that step one by one and meet for exchanges, over ``periods`` × H steps.

    A fragment's exchange begins when the last site has taken its step; a site goes on for τ steps, waits, and takes its
    part of the outer step.
    """
    count = len(exchange.fragment_bytes)
    every = exchange.sync_steps // count
    clocks = [0.0] * len(steps_s)
    due: dict[int, float] = {}  # step after which all sites need it → when it has arrived
    for step in range(1, periods * exchange.sync_steps + 1):
        clocks = [clock + own for clock, own in zip(clocks, steps_s, strict=True)]
        if step % every == 0:
            size = exchange.fragment_bytes[(step // every - 1) % count]
            hops = len(steps_s) - 1
            # Every site passes on its part of the data to the next one, in one direction at a time.
            sends = [size] * hops if exchange.is_gathered else [size / len(steps_s)] * (2 * hops)
            arrived = max(clocks) + sum(part / ring.bytes_per_s + ring.latency_s for part in sends)
            due[step + exchange.overlap_steps] = arrived
        if step in due:
            clocks = [max(clock, due[step]) + exchange.compute_s / count for clock in clocks]
    return max(clocks)


@settings(max_examples=40, deadline=None)
@given(exchanges(), rings, SECONDS, st.lists(st.floats(0.2, 1.0), min_size=1, max_size=7))
def test_a_simulation_of_sites_takes_as_long(
    exchange: Exchange, ring: Ring, slowest: float, others: list[float]
) -> None:
    exchange = replace(exchange, whole_share=0.0)
    steps = (slowest, *(slowest * one for one in others))
    ring = replace(ring, num_sites=len(steps))
    few, more = (simulated(exchange, steps, ring, periods) for periods in (2, 4))
    mean = (more - few) / (2 * exchange.sync_steps)
    assert exchange.mean_step_s(slowest, ring) == pytest.approx(mean, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(exchanges(), rings, SECONDS, st.floats(1.0, 100.0))
def test_more_bandwidth_less_latency_and_faster_sites_are_never_slower(
    exchange: Exchange, ring: Ring, inner: float, factor: float
) -> None:
    now = exchange.mean_step_s(inner, ring) * (1 + 1e-12)
    assert inner <= now
    assert exchange.mean_step_s(inner, replace(ring, bytes_per_s=factor * ring.bytes_per_s)) <= now
    assert exchange.mean_step_s(inner, replace(ring, latency_s=ring.latency_s / factor)) <= now
    assert exchange.mean_step_s(inner / factor, ring) <= now


@settings(max_examples=100, deadline=None)
@given(exchanges(), rings, SECONDS, st.integers(2, 10))
def test_exchanging_less_often_is_never_slower(exchange: Exchange, ring: Ring, inner: float, factor: int) -> None:
    seldom = replace(exchange, sync_steps=factor * exchange.sync_steps)
    assert seldom.mean_step_s(inner, ring) <= exchange.mean_step_s(inner, ring) * (1 + 1e-12)


def test_every_step_uncompressed_is_synchronous_data_parallelism() -> None:
    ring = Ring(num_sites=2, bytes_per_s=1.25e9, latency_s=0.03)
    gradient = 2e9
    exchange = Exchange(sync_steps=1, fragment_bytes=(gradient,))
    all_reduce_s = 2 * (2 - 1) * (gradient / 2 / 1.25e9 + 0.03)
    assert exchange.mean_step_s(1.0, ring) == pytest.approx(1.0 + all_reduce_s)
    local = replace(exchange, sync_steps=1, fragment_bytes=(gradient,), overlap_steps=0)
    assert local.mean_step_s(1.0, ring) == exchange.mean_step_s(1.0, ring)
    warm = replace(exchange, fragment_bytes=(gradient / 32,), whole_share=1.0, whole_bytes=gradient)
    assert warm.mean_step_s(1.0, ring) == pytest.approx(1.0 + all_reduce_s)
