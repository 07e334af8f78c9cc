"""What must hold of any serving engine, whatever its figures."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_cases import linear_cost, random_requests

from meshplan.catalogs.errors import SpecError
from meshplan.planner.serving.problem.config import EngineLimits, Role
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.serving.simulation.engine import simulate
from meshplan.planner.serving.simulation.metrics import samples_of, summarize
from meshplan.planner.serving.simulation.run import ServingRun

COST = linear_cost()
LIMITS = EngineLimits()
PLENTY = 10**7
BATCH = ServingWorkload(arrival=Arrival.ALL_AT_ONCE, input_length=500, output_length=50, num_requests=64)
POISSON = replace(BATCH, arrival=Arrival.POISSON, request_rate_per_s=8.0, num_requests=500)

loads = st.builds(
    lambda seed, num, rate, concurrency: random_requests(seed, num, rate_per_s=rate, concurrency=concurrency),
    st.integers(0, 2**32 - 1),
    st.integers(1, 80),
    st.sampled_from([1.0, 20.0, 300.0]),
    st.sampled_from([None, 1, 9]),
)
limits = st.builds(
    EngineLimits,
    max_num_seqs=st.sampled_from([1, 4, 64]),
    max_batched_tokens=st.sampled_from([16, 256, 4096]),
    chunked_prefill=st.booleans(),
)


def at_once(num: int, prompt: int, answer: int) -> Requests:
    return Requests(arrival_s=np.zeros(num), input_length=np.full(num, prompt), output_length=np.full(num, answer))


@settings(max_examples=150, deadline=None)
@given(requests=loads, limits=limits, capacity=st.sampled_from([64, 250, 1000, PLENTY]))
def test_everyone_is_served_or_rejected_and_no_figure_is_undefined(
    requests: Requests, limits: EngineLimits, capacity: int
) -> None:
    run = simulate(requests, COST, limits, kv_capacity_tokens=capacity)
    held = requests.input_length + requests.output_length - 1
    assert run.is_served.tolist() == (held <= capacity // 16 * 16).tolist()
    served = run.is_served
    assert np.isfinite(run.finish_s[served]).all()
    assert (run.arrival_s <= run.admitted_s)[served].all()
    assert (run.admitted_s < run.first_token_s)[served].all()
    assert (run.first_token_s <= run.finish_s)[served].all()
    metrics = summarize(run)
    figures = [value for value in vars_of(metrics) if isinstance(value, float)]
    figures += [value for one in metrics.latencies.values() for value in vars_of(one)]
    assert all(math.isfinite(value) for value in figures)
    assert metrics.num_served + metrics.num_rejected == len(requests)


@settings(max_examples=100, deadline=None)
@given(requests=loads, limits=limits, capacity=st.sampled_from([400, 1000, PLENTY]))
def test_tokens_out_are_the_answers(requests: Requests, limits: EngineLimits, capacity: int) -> None:
    run = simulate(requests, COST, limits, kv_capacity_tokens=capacity)
    segments = run.workers[0].segments
    decoded = float((segments.steps * segments.num_decoding).sum())
    answers = int(run.output_length[run.is_served].sum())
    # Each served request got one token from its prefill, and one more from each prefill that repeated one.
    assert answers - run.is_served.sum() - run.num_preemptions <= decoded <= answers - run.is_served.sum()
    metrics = summarize(run)
    assert metrics.output_tokens_per_s * metrics.duration_s == pytest.approx(answers)
    total = (run.finish_s - run.first_token_s)[run.is_served].sum()
    assert metrics.latencies["itl"].count * metrics.latencies["itl"].mean == pytest.approx(total, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(requests=loads, limits=limits, capacity=st.sampled_from([400, PLENTY]))
def test_a_worker_never_rests_while_a_request_waits(requests: Requests, limits: EngineLimits, capacity: int) -> None:
    run = simulate(requests, COST, limits, kv_capacity_tokens=capacity)
    segments = run.workers[0].segments
    assert (segments.start_s[1:] >= segments.end_s[:-1]).all()
    for start, end in zip(segments.end_s[:-1], segments.start_s[1:], strict=True):
        if end > start:
            waiting = (run.arrival_s < end) & (run.finish_s > start) & run.is_served
            assert not waiting.any()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    limits=limits,
    capacity=st.sampled_from([300, 600, 2000]),
    more=st.sampled_from([2, 5]),
)
def test_more_kv_cache_hardly_ever_costs_throughput(seed: int, limits: EngineLimits, capacity: int, more: int) -> None:
    requests = replace(random_requests(seed, 80), arrival_s=np.zeros(80))
    ends = [simulate(requests, COST, limits, kv_capacity_tokens=size).end_s for size in (capacity, capacity * more)]
    # Anomalies of list scheduling (Graham 1966) are real: who is admitted earlier may make the last batch longer.
    assert ends[1] <= 1.03 * ends[0]


def test_littles_law_in_a_closed_loop() -> None:
    workload = replace(BATCH, arrival=Arrival.CLOSED_LOOP, concurrency=16, num_requests=4000, length_ratio=0.5)
    for capacity in (PLENTY, 4000):
        run = simulate(make_requests(workload), COST, LIMITS, kv_capacity_tokens=capacity)
        metrics = summarize(run)
        e2e = metrics.latencies["e2e"].mean
        assert metrics.requests_per_s * e2e == pytest.approx(metrics.mean_in_flight, rel=1e-9)
        assert metrics.mean_in_flight == pytest.approx(16, rel=0.01)
        assert 16 - metrics.mean_queued == pytest.approx(metrics.mean_decoding, rel=0.2)


def test_without_company_ttft_is_the_own_prefill() -> None:
    requests = replace(make_requests(replace(POISSON, length_ratio=0.1)), arrival_s=np.arange(500) * 1e3)
    ttft = samples_of(simulate(requests, COST, LIMITS, kv_capacity_tokens=PLENTY), "ttft")
    own = [COST.step_s(0, 0, 1, m, m * (m + 1) / 2) for m in requests.input_length.tolist()]
    assert ttft.tolist() == pytest.approx(own, abs=1e-9)


def test_the_ttft_of_a_burst_grows_by_one_prefill_each() -> None:
    requests = at_once(40, 1000, 1)
    run = simulate(requests, COST, replace(LIMITS, max_batched_tokens=1000), kv_capacity_tokens=PLENTY)
    each = COST.step_s(0, 0, 1, 1000, 1000 * 1001 / 2)
    assert run.first_token_s.tolist() == pytest.approx([each * (i + 1) for i in range(40)])


@settings(max_examples=60, deadline=None)
@given(requests=loads, limits=limits)
def test_ttft_is_at_least_the_wait(requests: Requests, limits: EngineLimits) -> None:
    run = simulate(requests, COST, limits, kv_capacity_tokens=PLENTY)
    assert (samples_of(run, "ttft") >= run.admitted_s - run.arrival_s).all()


def test_queued_requests_wait_for_a_slot() -> None:
    run = simulate(at_once(2, 100, 50), COST, replace(LIMITS, max_num_seqs=1), kv_capacity_tokens=PLENTY)
    assert run.admitted_s[1] == run.finish_s[0]
    assert run.first_token_s[1] - run.arrival_s[1] > run.finish_s[0]


def test_tpot_rises_with_context() -> None:
    tpot = [
        summarize(simulate(at_once(8, prompt, 100), COST, LIMITS, kv_capacity_tokens=PLENTY)).latencies["tpot"].mean
        for prompt in (128, 4000)
    ]
    assert tpot[1] > 1.05 * tpot[0]


def test_ten_times_the_attention_changes_the_answer() -> None:
    requests = at_once(8, 4000, 100)
    runs = [
        summarize(simulate(requests, linear_cost(context_s=each), LIMITS, kv_capacity_tokens=PLENTY))
        for each in (5e-8, 5e-7)
    ]
    assert runs[1].latencies["tpot"].mean > 1.2 * runs[0].latencies["tpot"].mean


def test_speculation_shortens_the_answer() -> None:
    requests = make_requests(BATCH)
    ends = [
        simulate(requests, linear_cost(tokens_per_step=speed), LIMITS, kv_capacity_tokens=PLENTY).end_s
        for speed in (1.0, 1.4, 2.0)
    ]
    assert ends == sorted(ends, reverse=True)


def test_cached_prefixes_shorten_the_prefill_if_the_engine_keeps_them() -> None:
    requests = make_requests(replace(BATCH, prefix_hit_rate=0.9))
    ttft = [
        summarize(simulate(requests, COST, replace(LIMITS, prefix_caching=caching), kv_capacity_tokens=PLENTY))
        .latencies["ttft"]
        .mean
        for caching in (False, True)
    ]
    assert ttft[1] < 0.3 * ttft[0]


def test_a_shared_prefix_is_computed_once() -> None:
    requests = replace(
        at_once(3, 1000, 1),
        arrival_s=np.array([0.0, 10.0, 20.0]),
        cached_tokens=np.full(3, 900),
        prefix=np.array([4, 4, 5]),
    )
    ttft = samples_of(simulate(requests, COST, replace(LIMITS, prefix_caching=True), kv_capacity_tokens=PLENTY), "ttft")
    assert ttft[1] < 0.5 * ttft[0]
    assert ttft[2] == pytest.approx(ttft[0])


def test_urgent_requests_pass() -> None:
    requests = replace(at_once(20, 500, 20), priority=np.array([1] * 19 + [0]))
    run = simulate(requests, COST, replace(LIMITS, max_num_seqs=1), kv_capacity_tokens=PLENTY)
    assert run.first_token_s.argmin() == 19


def test_preemption_happens_to_the_youngest_and_costs_time() -> None:
    requests = at_once(2, 160, 100)
    alone, tight = (simulate(requests, COST, LIMITS, kv_capacity_tokens=size) for size in (PLENTY, 400))
    assert (alone.num_preemptions, tight.num_preemptions) == (0, 1)
    assert tight.finish_s[0] < tight.finish_s[1]
    assert tight.finish_s[0] < alone.finish_s[0]
    assert tight.finish_s[1] > alone.finish_s[1]


def test_answers_of_one_token_have_no_tpot() -> None:
    metrics = summarize(simulate(at_once(5, 100, 1), COST, LIMITS, kv_capacity_tokens=PLENTY))
    assert metrics.latencies["tpot"].count == metrics.latencies["itl"].count == 0
    assert metrics.latencies["tpot"].mean == 0.0
    with pytest.raises(SpecError, match="done after prefill"):
        simulate(at_once(5, 100, 1), COST, LIMITS, kv_capacity_tokens=PLENTY, role=Role.DECODE)


@pytest.mark.parametrize("concurrency", [None, 3])
def test_what_never_fits_is_rejected_and_holds_up_no_other(concurrency: int | None) -> None:
    requests = replace(
        at_once(6, 100, 20), concurrency=concurrency, input_length=np.array([100, 999, 100, 999, 5, 999])
    )
    run = simulate(requests, COST, LIMITS, kv_capacity_tokens=200)
    assert run.is_served.tolist() == [True, False, True, False, True, False]
    assert run.num_rejected == 3
    run = simulate(requests, COST, LIMITS, kv_capacity_tokens=0)
    assert run.num_rejected == 6
    assert summarize(run).output_tokens_per_s == 0.0


@pytest.mark.parametrize("wrong", [{"max_num_seqs": 0}, {"max_batched_tokens": 0}])
def test_limits_under_which_nothing_runs_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        simulate(at_once(1, 1, 1), COST, replace(LIMITS, **wrong), kv_capacity_tokens=PLENTY)


@pytest.mark.parametrize("seconds", [0.0, math.nan, math.inf])
def test_iterations_that_take_no_or_all_time_are_refused(seconds: float) -> None:
    cost = replace(COST, dense_s=[seconds] * 10, experts_s=[0.0] * 10, outputs_s=[0.0] * 10, decode_fixed_s=[0.0] * 10)
    with pytest.raises(ValueError, match="tables of the worker are wrong"):
        simulate(at_once(1, 1, 2), cost, LIMITS, kv_capacity_tokens=PLENTY)
    with pytest.raises(ValueError, match="holds 0 tokens"):
        simulate(at_once(1, 1, 2), COST, LIMITS, kv_capacity_tokens=PLENTY, kv_block_tokens=0)


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> ServingRun:
        return simulate(make_requests(POISSON, seed=seed), COST, LIMITS, kv_capacity_tokens=50_000)

    assert np.array_equal(run(3).finish_s, run(3).finish_s)
    assert not np.array_equal(run(3).finish_s, run(4).finish_s)


def vars_of(record: object) -> list[object]:
    return [getattr(record, name) for name in record.__dataclass_fields__]
