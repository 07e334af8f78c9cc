"""Figures of runs against what plain counting gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_cases import linear_cost, random_requests

from meshplan.planner.serving.problem.config import EngineLimits
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.simulation.engine import simulate
from meshplan.planner.serving.simulation.metrics import (
    confidence_interval,
    itl,
    latency,
    samples_of,
    series,
    steady_tokens_per_s,
    steady_window_s,
    summarize,
)
from meshplan.planner.serving.simulation.reference import reference_run
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.slo_attainment import attained, attainment, goodput, wilson_lower

COST = linear_cost()
LIMITS = EngineLimits(max_num_seqs=32, max_batched_tokens=512)


def some_run(seed: int = 0, *, num: int = 200, chunked: bool = True, capacity: int = 3000) -> ServingRun:
    requests = random_requests(seed, num, rate_per_s=30.0)
    return simulate(requests, COST, replace(LIMITS, chunked_prefill=chunked), kv_capacity_tokens=capacity)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), chunked=st.booleans(), capacity=st.sampled_from([300, 3000]), num=st.integers(2, 80)
)
def test_gaps_between_tokens_are_those_of_every_token(seed: int, chunked: bool, capacity: int, num: int) -> None:
    requests = random_requests(seed, num, rate_per_s=30.0, shortest_output=2)
    limits = replace(LIMITS, chunked_prefill=chunked)
    everyone, _ = reference_run(requests, COST, limits, kv_capacity_tokens=capacity, kv_block_tokens=16)
    gaps = np.sort(np.concatenate([np.diff(request.token_s) for request in everyone]))
    seen = itl(simulate(requests, COST, limits, kv_capacity_tokens=capacity).workers)
    assert seen.count == len(gaps)
    assert seen.mean == pytest.approx(gaps.mean(), rel=1e-9)
    for share, value in ((0.5, seen.p50), (0.9, seen.p90), (0.95, seen.p95), (0.99, seen.p99)):
        # A stretch spreads its gaps evenly, where an iteration has as many alike as requests decode.
        place, alike = share * len(gaps), LIMITS.max_num_seqs
        low, high = gaps[max(int(place) - alike, 0)], gaps[min(int(place) + alike, len(gaps) - 1)]
        assert low * (1 - 1e-6) <= value <= high * (1 + 1e-6)


def test_percentiles_are_numpys() -> None:
    samples = np.random.default_rng(0).exponential(1.0, 999)
    seen = latency(samples)
    assert (seen.p50, seen.p99) == tuple(np.quantile(samples, [0.5, 0.99]))
    assert latency(np.zeros(0)).p99 == 0.0


def test_throughput_is_tokens_over_time() -> None:
    run = some_run()
    metrics = summarize(run, num_devices=4)
    assert metrics.output_tokens_per_s == pytest.approx(run.output_length.sum() / (run.end_s - run.arrival_s[0]))
    assert metrics.output_tokens_per_s_per_device == metrics.output_tokens_per_s / 4
    assert metrics.requests_per_s == pytest.approx(200 / (run.end_s - run.arrival_s[0]))


def test_the_steady_rate_leaves_out_ramp_and_tail() -> None:
    """A few endless answers at the end halve the rate of the run, and say nothing about the time before."""
    requests = random_requests(3, 400, rate_per_s=1e9, shortest_output=2)
    run = simulate(requests, COST, LIMITS, kv_capacity_tokens=30_000)
    steady = steady_tokens_per_s(run, LIMITS.max_num_seqs)
    outputs = requests.output_length.copy()
    outputs[-2:] = 4000
    long_tail = simulate(replace(requests, output_length=outputs), COST, LIMITS, kv_capacity_tokens=30_000)
    assert summarize(long_tail).output_tokens_per_s < 0.7 * summarize(run).output_tokens_per_s
    assert steady_tokens_per_s(long_tail, LIMITS.max_num_seqs) == pytest.approx(steady, rel=0.05)
    assert steady > summarize(run).output_tokens_per_s
    assert steady_tokens_per_s(some_run(num=20), LIMITS.max_num_seqs) == 0.0  # never so many at once


def test_the_steady_window_ends_before_the_tail_of_a_short_run() -> None:
    """All requests at once, fewer than two full batches: what follows the last admission is tail, not rate."""
    run = simulate(random_requests(3, 50, rate_per_s=1e9, shortest_output=40), COST, LIMITS, kv_capacity_tokens=30_000)
    window = steady_window_s(run, LIMITS.max_num_seqs)
    assert window is not None
    start, end = window
    assert np.count_nonzero(run.first_token_s <= start) == LIMITS.max_num_seqs
    assert np.count_nonzero(run.finish_s > end) == LIMITS.max_num_seqs + 1  # one more than may run: none waits
    assert steady_tokens_per_s(run, LIMITS.max_num_seqs) > 1.1 * summarize(run).output_tokens_per_s


def test_a_first_token_is_one_of_the_steady_rate() -> None:
    """Answers of two tokens: half of what a client counts are first ones."""
    requests = random_requests(5, 200, rate_per_s=1e9, shortest_output=2)
    requests = replace(requests, output_length=np.full(len(requests), 2, dtype=np.int64))
    run = simulate(requests, COST, LIMITS, kv_capacity_tokens=30_000)
    start, end = steady_window_s(run, LIMITS.max_num_seqs) or (0.0, 0.0)
    stamps = np.concatenate([run.first_token_s, run.finish_s])
    counted = np.count_nonzero((stamps > start) & (stamps <= end)) / (end - start)
    assert steady_tokens_per_s(run, LIMITS.max_num_seqs) == pytest.approx(counted, rel=0.1)


def test_goodput_counts_requests_that_stay_within_every_limit() -> None:
    run = some_run()
    slos = [
        Slo(metric="ttft", percentile="p99", limit_s=float(np.median(samples_of(run, "ttft")))),
        Slo(metric="tpot", percentile="p50", limit_s=float(np.median(samples_of(run, "tpot")))),
    ]
    ttft = run.first_token_s - run.arrival_s <= slos[0].limit_s
    gaps = np.maximum(run.output_length - 1, 1)
    tpot = ((run.finish_s - run.first_token_s) / gaps <= slos[1].limit_s) | (run.output_length == 1)
    assert attained(run, slos).tolist() == (ttft & tpot).tolist()
    expected = (ttft & tpot).sum() / (run.end_s - run.arrival_s[0])
    assert goodput(run, slos) == pytest.approx(expected)
    assert attainment(run, slos) == ((ttft & tpot).mean(), wilson_lower(int((ttft & tpot).sum()), 200))
    assert goodput(run, []) == pytest.approx(summarize(run).requests_per_s)


@pytest.mark.parametrize("percentile", ["mean", "p50", "p90", "p95", "p99"])
def test_confidence_intervals_cover_the_truth(percentile: str) -> None:
    random = np.random.default_rng(7)
    truth = 1.0 if percentile == "mean" else -np.log(1.0 - int(percentile[1:]) / 100.0)
    covered = 0
    for _ in range(400):
        low, high = confidence_interval(random.exponential(1.0, 1000), percentile)
        covered += low <= truth <= high
    assert covered / 400 >= 0.92


def test_intervals_of_dependent_samples_are_wider() -> None:
    random = np.random.default_rng(3)
    alone = random.normal(size=4000)
    together = np.repeat(random.normal(size=40), 100)
    for percentile in ("mean", "p90"):
        widths = [np.diff(confidence_interval(samples, percentile))[0] for samples in (alone, together)]
        assert widths[1] > 3 * widths[0]


def test_wilson_bounds_a_share() -> None:
    assert wilson_lower(0, 0) == wilson_lower(0, 10) == 0.0
    assert wilson_lower(1000, 1000) == pytest.approx(0.99617, abs=1e-5)
    assert wilson_lower(50, 100) == pytest.approx(0.4038, abs=1e-4)


def test_the_series_adds_up() -> None:
    run = some_run(num=300, capacity=1500)
    shown, metrics = series(run, num_bins=50), summarize(run)
    width = metrics.duration_s / 50
    assert shown.end_s[-1] == pytest.approx(run.end_s)
    present = (shown.decoding + shown.prefilling + shown.queued).sum() * width
    assert present == pytest.approx((run.finish_s - run.arrival_s).sum(), rel=1e-6)
    assert shown.queued.max() > 1.0
    assert 0.5 < shown.kv_use.max() <= 1.0
    assert shown.kv_use.min() >= 0.0
