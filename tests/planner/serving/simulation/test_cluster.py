"""Several workers: the shorter way equals the longer, routing, and disaggregated prefill and decode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_cases import linear_cost, random_requests

from meshplan.catalogs.errors import SpecError
from meshplan.planner.serving.problem.config import EngineLimits, Role, Router
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.simulation.cluster import (
    KvLink,
    ServingSystem,
    SimulatedPool,
    simulate_system,
    simulate_together,
)
from meshplan.planner.serving.simulation.engine import simulate
from meshplan.planner.serving.simulation.metrics import summarize

LIMITS = EngineLimits(max_num_seqs=16, max_batched_tokens=512)
COST = linear_cost(most_seqs=16, most_tokens=512)
MIXED = SimulatedPool(cost=COST, limits=LIMITS, kv_capacity_tokens=2000)
SLOW_LINK = KvLink(kv_bytes_per_token=1e5, bandwidth_bytes_per_s=1e9, latency_s=1e-3)


def disaggregated(prefill: int = 1, decode: int = 1, link: KvLink = SLOW_LINK, **more: bool) -> ServingSystem:
    return ServingSystem(
        pools=(
            replace(MIXED, role=Role.PREFILL, num_workers=prefill),
            replace(MIXED, role=Role.DECODE, num_workers=decode),
        ),
        link=link,
        **more,
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(1, 60),
    concurrency=st.sampled_from([None, 1, 7, 30]),
    rate=st.sampled_from([2.0, 20.0, 100.0]),
    capacity=st.sampled_from([300, 2000, 10**6]),
    chunked=st.booleans(),
)
def test_one_worker_behind_a_router_is_one_worker(
    seed: int, num: int, concurrency: int | None, rate: float, capacity: int, chunked: bool
) -> None:
    requests = random_requests(seed, num, concurrency=concurrency, rate_per_s=rate)
    limits = replace(LIMITS, chunked_prefill=chunked)
    alone = simulate(requests, COST, limits, kv_capacity_tokens=capacity)
    pool = replace(MIXED, limits=limits, kv_capacity_tokens=capacity)
    routed = simulate_together(requests, ServingSystem(pools=(pool,)))
    assert routed.finish_s.tolist() == pytest.approx(alone.finish_s.tolist(), rel=1e-9)
    assert routed.first_token_s.tolist() == pytest.approx(alone.first_token_s.tolist(), rel=1e-9)
    assert routed.num_preemptions == alone.num_preemptions
    assert summarize(routed).latencies["itl"].mean == pytest.approx(summarize(alone).latencies["itl"].mean, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(1, 60),
    rate=st.sampled_from([2.0, 20.0, 300.0]),
    workers=st.integers(2, 5),
    capacity=st.sampled_from([300, 2000]),
    chunked=st.booleans(),
)
def test_round_robin_is_that_many_separate_workers(
    seed: int, num: int, rate: float, workers: int, capacity: int, chunked: bool
) -> None:
    requests = random_requests(seed, num, rate_per_s=rate)
    limits = replace(LIMITS, chunked_prefill=chunked)
    pool = replace(MIXED, limits=limits, kv_capacity_tokens=capacity, num_workers=workers)
    run = simulate_system(requests, ServingSystem(pools=(pool,), router=Router.ROUND_ROBIN))
    for first in range(min(workers, num)):
        share = Requests(
            arrival_s=requests.arrival_s[first::workers],
            input_length=requests.input_length[first::workers],
            output_length=requests.output_length[first::workers],
        )
        alone = simulate(share, COST, limits, kv_capacity_tokens=capacity)
        assert run.finish_s[first::workers].tolist() == pytest.approx(alone.finish_s.tolist(), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rate=st.sampled_from([2.0, 20.0, 300.0]),
    decode=st.integers(1, 3),
    capacity=st.sampled_from([300, 2000]),
)
def test_disaggregated_pools_are_a_prefill_run_a_link_and_a_decode_run(
    seed: int, rate: float, decode: int, capacity: int
) -> None:
    requests = random_requests(seed, 40, rate_per_s=rate, shortest_output=2)
    system = disaggregated(1, decode)
    pools = tuple(replace(pool, kv_capacity_tokens=capacity) for pool in system.pools)
    run = simulate_system(requests, replace(system, pools=pools, router=Router.ROUND_ROBIN))
    first = simulate(requests, COST, LIMITS, kv_capacity_tokens=capacity, role=Role.PREFILL)
    assert run.first_token_s.tolist() == pytest.approx(first.first_token_s.tolist(), rel=1e-9)
    arrival, free = np.zeros(40), 0.0
    for i in np.argsort(first.finish_s, kind="stable"):
        free = max(free, first.finish_s[i]) + 1e5 * requests.input_length[i] / 1e9
        arrival[i] = free + 1e-3
    order = np.argsort(arrival, kind="stable")
    for which in range(decode):
        share = order[which::decode]
        second = simulate(
            Requests(
                arrival_s=arrival[share],
                input_length=requests.input_length[share],
                output_length=requests.output_length[share],
                priority=share,
            ),
            COST,
            LIMITS,
            kv_capacity_tokens=capacity,
            role=Role.DECODE,
        )
        assert run.finish_s[share].tolist() == pytest.approx(second.finish_s.tolist(), rel=1e-9)


def test_a_closed_loop_keeps_its_number_in_flight_over_all_workers() -> None:
    requests = random_requests(3, 300, concurrency=24)
    for system in (ServingSystem(pools=(replace(MIXED, num_workers=3),)), disaggregated(2, 2)):
        run = simulate_system(requests, system)
        moments = np.sort(run.arrival_s)[30:-30] + 1e-9
        in_flight = [int(((run.arrival_s <= t) & (run.finish_s > t)).sum()) for t in moments]
        assert set(in_flight) == {24}


@pytest.mark.parametrize("router", [Router.ROUND_ROBIN, Router.LEAST_LOADED])
def test_alike_workers_in_a_closed_loop_are_alike_loops(router: Router) -> None:
    alone = Requests(
        arrival_s=np.zeros(40), input_length=np.full(40, 300), output_length=np.full(40, 25), concurrency=5
    )
    together = Requests(
        arrival_s=np.zeros(120), input_length=np.full(120, 300), output_length=np.full(120, 25), concurrency=15
    )
    pool = replace(MIXED, num_workers=3)
    run = simulate_system(together, ServingSystem(pools=(pool,), router=router))
    one = simulate(alone, COST, LIMITS, kv_capacity_tokens=MIXED.kv_capacity_tokens)
    assert np.sort(run.finish_s).tolist() == pytest.approx(np.sort(np.tile(one.finish_s, 3)).tolist(), rel=1e-9)


def test_the_least_loaded_worker_beats_round_robin_on_uneven_requests() -> None:
    rng = np.random.default_rng(0)
    requests = Requests(
        arrival_s=np.cumsum(rng.exponential(0.05, 400)),
        input_length=np.where(np.arange(400) % 2 == 0, 1500, 20),
        output_length=np.full(400, 20),
    )
    pool = replace(MIXED, num_workers=2)
    ttft = {
        router: summarize(simulate_system(requests, ServingSystem(pools=(pool,), router=router))).latencies["ttft"].mean
        for router in Router
    }
    assert ttft[Router.LEAST_LOADED] < 0.8 * ttft[Router.ROUND_ROBIN]


def test_prefix_aware_routing_finds_more_of_what_is_cached() -> None:
    rng = np.random.default_rng(1)
    requests = Requests(
        arrival_s=np.cumsum(rng.exponential(0.1, 200)),
        input_length=np.full(200, 400),
        output_length=np.full(200, 5),
        cached_tokens=np.full(200, 300),
        prefix=rng.integers(0, 8, 200),
    )
    pool = replace(MIXED, limits=replace(LIMITS, prefix_caching=True), num_workers=4, kv_capacity_tokens=900)
    ttft = {
        router: summarize(simulate_system(requests, ServingSystem(pools=(pool,), router=router))).latencies["ttft"].mean
        for router in (Router.LEAST_LOADED, Router.PREFIX_AWARE)
    }
    assert ttft[Router.PREFIX_AWARE] < ttft[Router.LEAST_LOADED]


def test_the_first_token_is_seen_after_the_transfer_if_the_decode_worker_answers() -> None:
    requests = random_requests(5, 50, rate_per_s=5.0)
    early = simulate_system(requests, disaggregated())
    late = simulate_system(requests, disaggregated(first_token_from_decode=True))
    assert early.finish_s.tolist() == late.finish_s.tolist()
    several = requests.output_length > 1
    least = 1e5 * requests.input_length / 1e9 + 1e-3
    assert (late.first_token_s - early.first_token_s)[several].min() > 0
    assert ((late.first_token_s - early.first_token_s) >= least)[several].all()
    assert (late.first_token_s == early.first_token_s)[~several].all()


def test_a_slower_link_and_a_shared_one_delay_the_answers() -> None:
    requests = random_requests(6, 200, rate_per_s=100.0, shortest_output=2)
    ends = [
        simulate_system(requests, disaggregated(3, 3, replace(SLOW_LINK, **change))).finish_s.mean()
        for change in ({"bandwidth_bytes_per_s": 1e11}, {}, {"is_shared": True}, {"is_shared": True, "latency_s": 1.0})
    ]
    assert ends == sorted(ends)
    assert ends[0] < ends[-1]


def test_a_decode_server_that_reads_the_prompt_delays_its_own_request_and_no_other() -> None:
    requests = Requests(
        arrival_s=np.array([0.0, 10.0]), input_length=np.array([100, 400]), output_length=np.array([5, 5])
    )
    plain = simulate_system(requests, disaggregated(first_token_from_decode=True))
    reading = replace(SLOW_LINK, reads_prompt_s_per_token=1e-3)
    reads = simulate_system(requests, disaggregated(link=reading, first_token_from_decode=True))
    later = reads.first_token_s - plain.first_token_s
    assert later.tolist() == pytest.approx([0.1, 0.4])
    assert reading.transfer_s(400) == pytest.approx(0.4 + SLOW_LINK.transfer_s(400))


def test_a_slot_that_is_held_until_the_cache_has_arrived_is_one_prompt_at_a_time() -> None:
    """With one slot, prefills and transfers take turns; with slots for all, or instant links, nothing changes."""
    num, tokens = 12, 100
    requests = Requests(arrival_s=np.zeros(num), input_length=np.full(num, tokens), output_length=np.full(num, 3))
    holding = replace(SLOW_LINK, holds_slots=True)
    system = disaggregated(link=holding)
    one = replace(system.pools[0], limits=replace(LIMITS, max_num_seqs=1))
    run = simulate_system(requests, replace(system, pools=(one, system.pools[1])))
    prefill_s = COST.step_s(0, 0.0, 1, tokens, tokens * (tokens + 1) / 2)
    each = prefill_s + holding.transfer_s(tokens)
    assert np.sort(run.first_token_s).tolist() == pytest.approx((np.arange(num) * each + prefill_s).tolist())
    assert run.is_served.all()
    plain = simulate_system(requests, disaggregated())
    assert simulate_system(requests, system).finish_s.tolist() == plain.finish_s.tolist()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 4), concurrency=st.sampled_from([None, 5]))
def test_no_more_requests_are_prefilled_or_sent_at_once_than_slots(
    seed: int, slots: int, concurrency: int | None
) -> None:
    """Counted from the run alone: a request is there from its admission until a link of one cache at a time sent it."""
    requests = random_requests(seed, 30, rate_per_s=200.0, concurrency=concurrency, shortest_output=2)
    system = disaggregated(link=replace(SLOW_LINK, holds_slots=True))
    few = replace(system.pools[0], limits=replace(LIMITS, max_num_seqs=slots))
    run = simulate_system(requests, replace(system, pools=(few, system.pools[1])))
    assert run.is_served.all()
    free_s, events = 0.0, []
    for i in np.argsort(run.first_token_s, kind="stable"):
        free_s = max(free_s, run.first_token_s[i]) + 1e5 * requests.input_length[i] / 1e9
        events += [(free_s + SLOW_LINK.latency_s - 1e-12, -1), (run.admitted_s[i], 1)]
    assert np.cumsum([change for _, change in sorted(events)]).max() <= slots


def test_gaps_of_disaggregated_pools_include_the_transfer() -> None:
    requests = random_requests(7, 60, rate_per_s=3.0)
    for hidden in (False, True):
        run = simulate_system(requests, disaggregated(first_token_from_decode=hidden))
        total = (run.finish_s - run.first_token_s).sum()
        itl = summarize(run).latencies["itl"]
        assert itl.count * itl.mean == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize(
    ("system", "named"),
    [
        (ServingSystem(pools=()), "give mixed pools"),
        (ServingSystem(pools=(replace(MIXED, role=Role.DECODE),)), "give mixed pools"),
        (replace(disaggregated(), link=None), "bandwidth above 0"),
        (ServingSystem(pools=(replace(MIXED, num_workers=0),)), "0 workers"),
    ],
)
def test_what_is_no_system_is_refused(system: ServingSystem, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        simulate_system(random_requests(0, 3), system)
