"""The formula of an exchange: its properties, and a simulation of sites and a link that knows nothing of it."""

from __future__ import annotations

import math
import random
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


def pipelined(steps_s: tuple[float, ...], hop_s: float, latency_s: float, batches: int, pieces: int) -> float:
    """Mean time of a batch through sites in a row that never flush; a site and each direction of a link serve in turn.

    A batch is ``pieces`` micro-batches; a third of a site's time is the forward pass, backward passes go first, and at
    most twice as many micro-batches are under way as hide every hop.
    """
    sites, number = len(steps_s), batches * pieces
    longest = max(*steps_s, hop_s) / pieces
    most = 2 * (sites * 2 + math.ceil(2 * (sites - 1) * (latency_s + hop_s / pieces) / longest) + 1)
    free, links = [0.0] * sites, [[0.0, 0.0] for _ in range(sites - 1)]
    waiting: list[list[tuple[bool, float, int]]] = [[] for _ in range(sites)]  # (is forward, arrived, micro-batch)
    waiting[0] = [(True, 0.0, piece) for piece in range(min(most, number))]
    done: list[float] = []
    while len(done) < number:
        begins = [(max(free[site], min(one[1] for one in some)), site) for site, some in enumerate(waiting) if some]
        now, site = min(begins)
        is_forward, _, piece = task = min(one for one in waiting[site] if one[1] <= now)
        waiting[site].remove(task)
        last = site == sites - 1
        share = (1.0 if is_forward and last else 1 / 3 if is_forward else 2 / 3) / pieces
        free[site] = now + share * steps_s[site]
        if is_forward and not last:
            links[site][0] = max(links[site][0], free[site]) + hop_s / pieces
            waiting[site + 1].append((True, links[site][0] + latency_s, piece))
        elif site:
            links[site - 1][1] = max(links[site - 1][1], free[site]) + hop_s / pieces
            waiting[site - 1].append((False, links[site - 1][1] + latency_s, piece))
        else:
            done.append(free[site])
            if piece + most < number:
                waiting[0].append((True, free[site], piece + most))
    begin, end = number // 2, number - 1
    return (done[end] - done[begin]) / (end - begin) * pieces


def test_a_pipeline_that_never_flushes_goes_at_the_pace_of_its_slowest_part() -> None:
    source = random.Random(11)
    for _ in range(12):
        steps = tuple(source.uniform(0.3, 1.0) for _ in range(source.randint(2, 4)))
        hop, latency = source.uniform(0.1, 2.0), source.uniform(0.0, 0.2)
        found = pipelined(steps, hop, latency, batches=30, pieces=8)
        exchange = Exchange(sync_steps=1, fragment_bytes=(hop * 1e9,), overlap_steps=1, is_hop=True)
        ring = Ring(num_sites=len(steps), bytes_per_s=1e9, latency_s=0.0)
        assert exchange.mean_step_s(max(steps), ring) == pytest.approx(found, rel=0.03)


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
