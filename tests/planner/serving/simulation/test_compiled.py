"""Machine code gives the bits of the simulator in Python: every time of every request, every segment, every gap."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_cases import linear_cost, random_requests

from meshplan.planner.serving.estimator.step_cost import beside_the_front_end
from meshplan.planner.serving.estimator.table import Table, token_knots
from meshplan.planner.serving.problem.config import Admission, EngineLimits, Role, Router
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.simulation.cluster import KvLink, ServingSystem, SimulatedPool, simulate_system
from meshplan.planner.serving.simulation.compiled import choice
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping, SloViolatedError
from meshplan.planner.serving.simulation.run import ServingRun

pytest.importorskip("numba")

ADMISSIONS = [
    Admission(),
    Admission(receive_interval=7),
    Admission(batch_wait_steps=9, batch_wait_share=0.3),
    Admission(receive_interval=3, batch_wait_steps=4, batch_wait_share=0.6, balance_wait_steps=6),
]
Both = tuple[ServingRun | str, ServingRun | str]


def both(
    monkeypatch: pytest.MonkeyPatch, system: ServingSystem, stopping: EarlyStopping | None = None, **load: object
) -> Both:
    """The same run in Python and in machine code; the violated SLO where it was stopped."""
    requests = random_requests(**load)  # type: ignore[arg-type]
    found = []
    for least in (math.inf, 0):
        for name in ("LEAST_TO_LOAD", "LEAST_STORED", "LEAST_TOGETHER"):
            monkeypatch.setattr(choice, name, least)
        monkeypatch.setattr(choice, "LEAST_LOADED", least)
        try:
            found.append(simulate_system(requests, system, stopping))
        except SloViolatedError as error:
            found.append(error.slo.key)
    return found[0], found[1]


def assert_same(one: ServingRun | str, other: ServingRun | str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    for name in ("arrival_s", "admitted_s", "first_token_s", "finish_s", "is_served"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert len(one.workers) == len(other.workers)
    for mine, theirs in zip(one.workers, other.workers, strict=True):
        for name in mine.segments.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(mine.segments, name), getattr(theirs.segments, name), err_msg=name)
        np.testing.assert_array_equal(mine.gap_s, theirs.gap_s)
        np.testing.assert_array_equal(mine.gap_count, theirs.gap_count)
        assert (mine.num_preemptions, mine.kv_capacity_tokens) == (theirs.num_preemptions, theirs.kv_capacity_tokens)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(1, 80),
    rate=st.sampled_from([0.5, 5.0, 20.0, 200.0]),
    lag=st.sampled_from([0.0, 1.0, 0.37, 2.6]),
    admission=st.sampled_from(ADMISSIONS),
    slots=st.sampled_from([1, 2, 5, 64]),
    budget=st.sampled_from([1, 7, 64, 300, 4096]),
    blocks=st.sampled_from([8, 17, 30, 90, 10_000]),
    block=st.sampled_from([1, 4, 16]),
    chunked=st.booleans(),
    concurrent_batches=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    speed=st.sampled_from([1.0, 1.0, 1.7351, 2.0, 2.9]),
    num_priorities=st.sampled_from([1, 1, 3]),
    caches=st.booleans(),
    graphed=st.sampled_from([0, 40]),
    # of one kind, and whether another stands beside them
    workers=st.tuples(st.sampled_from([1, 1, 2, 3]), st.booleans()),
    router=st.sampled_from(list(Router)),
    limit_s=st.sampled_from([None, None, 0.5, 5.0]),
    # in flight, s to the next request, s between the first ones
    loop=st.sampled_from([None, None, (1, 0.0, 0.0), (3, 0.03, 0.0), (3, 0.03, 0.2), (20, 0.0, 0.0), (20, 0.0, 0.013)]),
    # workers that prefill, of their own link, keeping slots meanwhile, and whether the other worker answers the client
    apart=st.sampled_from([None, None, (1, False, False, True), (2, True, True, True), (3, False, True, False)]),
)
def test_every_bit_is_the_same(
    seed: int,
    num: int,
    rate: float,
    lag: float,
    admission: Admission,
    slots: int,
    budget: int,
    blocks: int,
    block: int,
    chunked: bool,
    concurrent_batches: tuple[int, int],
    speed: float,
    num_priorities: int,
    caches: bool,
    graphed: int,
    workers: tuple[int, bool],
    router: Router,
    limit_s: float | None,
    loop: tuple[int, float, float] | None,
    apart: tuple[int, bool, bool, bool] | None,
) -> None:
    concurrency, think_s, ramp_s = loop or (None, 0.0, 0.0)
    random = np.random.default_rng(seed)
    cost = replace(
        linear_cost(
            concurrent_batches=concurrent_batches[0],
            pipeline_parallel=concurrent_batches[1],
            tokens_per_step=speed,
            verified_tokens=math.ceil(speed),
            fixed_s=float(random.uniform(1e-3, 2e-2)),
            token_s=float(random.uniform(1e-6, 1e-4)),
            context_s=float(random.choice([0.0, random.uniform(1e-9, 1e-5)])),
            least_s=float(random.choice([0.0, 1e-2])),
            admission_steps=lag,
        ),
        graphed_tokens=graphed,
        launches_ahead=bool(random.integers(2)),
    )
    cost = beside_the_front_end(cost, float(random.choice([0.0, 1e-4, 1e-3])), (1.0, 200.0))
    limits = EngineLimits(
        max_num_seqs=slots,
        max_batched_tokens=budget,
        chunked_prefill=chunked,
        prefix_caching=caches,
        admission=admission,
    )
    pool = SimulatedPool(cost=cost, limits=limits, kv_capacity_tokens=blocks * block, num_workers=workers[0])
    other = replace(pool, limits=replace(limits, max_num_seqs=2 * slots), num_workers=1, weight=3)
    system = ServingSystem(pools=(pool, other) if workers[1] else (pool,), router=router, kv_block_tokens=block)
    if apart is not None:
        prefill = replace(other, num_workers=apart[0], weight=1, role=Role.PREFILL)
        link = KvLink(
            kv_bytes_per_token=1e6,
            bandwidth_bytes_per_s=float(random.choice([1e8, 1e10])),
            latency_s=float(random.choice([0.0, 1e-3])),
            reads_prompt_s_per_token=float(random.choice([0.0, 1e-5])),
            is_shared=apart[1],
            holds_slots=apart[2],
        )
        pools = (prefill, replace(pool, role=Role.DECODE))
        system = replace(system, pools=pools, link=link, first_token_from_decode=apart[3])
    slos = [] if limit_s is None else [Slo(metric="ttft", percentile="p95", limit_s=limit_s)]
    slos += [Slo(metric="tpot", percentile="mean", limit_s=slo.limit_s / 50) for slo in slos]
    with pytest.MonkeyPatch.context() as patch:
        one, two = both(
            patch,
            system,
            EarlyStopping(slos=slos) if slos else None,
            seed=seed,
            num=num,
            rate_per_s=rate,
            num_priorities=num_priorities,
            cached=caches,
            concurrency=concurrency,
            think_s=think_s,
            ramp_s=ramp_s,
        )
    assert_same(one, two)


def test_records_grow_as_far_as_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt token an iteration: many more segments than the arrays begin with."""
    cost = linear_cost(most_seqs=16, most_tokens=512)
    pool = SimulatedPool(cost=cost, limits=EngineLimits(max_num_seqs=16, max_batched_tokens=17), kv_capacity_tokens=900)
    for workers in (1, 2):
        system = ServingSystem(pools=(replace(pool, num_workers=workers),))
        one, two = both(monkeypatch, system, seed=1, num=300, longest_input=800)
        assert_same(one, two)
        assert isinstance(two, ServingRun)
        assert sum(len(worker.segments) for worker in two.workers) > 1024 + 3 * 300


def test_what_machine_code_does_not_know_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("not for machine code")

    monkeypatch.setattr("meshplan.planner.serving.simulation.compiled.serve.serve", refuse)
    monkeypatch.setattr(choice, "LEAST_TO_LOAD", 0)
    monkeypatch.setattr(choice, "LEAST_LOADED", 0)
    cost, limits = linear_cost(most_seqs=16, most_tokens=512), EngineLimits(max_num_seqs=16, max_batched_tokens=512)
    pool = SimulatedPool(cost=cost, limits=limits, kv_capacity_tokens=900, num_workers=2)
    apart = (replace(pool, role=Role.PREFILL), replace(pool, role=Role.DECODE))
    link = KvLink(kv_bytes_per_token=1e5, bandwidth_bytes_per_s=1e9)
    requests = random_requests(1, 40)
    shared = replace(requests, prefix=np.zeros(40, dtype=np.int64))
    loop, ramp = random_requests(1, 40, concurrency=3), random_requests(1, 40, concurrency=3, ramp_s=0.1)
    one, two = (ServingSystem(pools=(replace(pool, num_workers=workers),)) for workers in (1, 2))
    for system in (one, two, ServingSystem(pools=apart, link=link)):
        assert simulate_system(shared, system).is_served.all()
        for known in (requests, loop, ramp):
            with pytest.raises(AssertionError):
                simulate_system(known, system)


@pytest.mark.parametrize("most", [1, 700, 5000])
def test_a_whole_table_is_every_entry(most: int) -> None:
    knots = token_knots(most)
    table = Table(knots, np.sqrt(knots) * 1e-3 + np.sin(knots) * 1e-4, most)
    assert table.whole().tolist() == [table[i] for i in range(most + 1)]
