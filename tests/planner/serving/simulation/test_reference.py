"""The event-skipping worker and the reference implementation agree, request by request and gap by gap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulation_cases import linear_cost, random_requests

from meshplan.planner.serving.problem.config import Admission, EngineLimits, Role
from meshplan.planner.serving.simulation.engine import simulate
from meshplan.planner.serving.simulation.reference import ReferenceRequest, reference_run
from meshplan.planner.serving.simulation.run import ServingRun

EQUAL = {"rel": 1e-9, "abs": 1e-12}
# Events nearer than this are one moment.
TIE_S = 1e-9
ADMISSIONS = [
    Admission(),
    Admission(),
    Admission(receive_interval=7),
    Admission(batch_wait_steps=5),
    Admission(batch_wait_steps=9, batch_wait_share=0.3),
    Admission(balance_wait_steps=11),
    Admission(receive_interval=3, batch_wait_steps=4, batch_wait_share=0.6, balance_wait_steps=6),
]


def gap_sums(run: ServingRun) -> tuple[float, float, float]:
    """How many gaps between tokens there were, their sum and the sum of their squares."""
    count = total = squares = 0.0
    for worker in run.workers:
        segments = worker.segments
        for steps, first, last, weight in zip(
            segments.steps, segments.first_step_s, segments.last_step_s, segments.num_gaps, strict=True
        ):
            gaps = np.linspace(first, last, int(steps))
            count += weight * len(gaps)
            total += weight * gaps.sum()
            squares += weight * (gaps**2).sum()
        count += worker.gap_count.sum()
        total += (worker.gap_count * worker.gap_s).sum()
        squares += (worker.gap_count * worker.gap_s**2).sum()
    return count, total, squares


def reference_gap_sums(everyone: list[ReferenceRequest]) -> tuple[float, float, float]:
    gaps = np.concatenate([np.diff(request.token_s) for request in everyone] or [np.zeros(0)])
    return len(gaps), gaps.sum(), (gaps**2).sum()


def arrives_with_a_token(everyone: list[ReferenceRequest]) -> bool:
    """Whether a request comes within rounding of another's token.

    A client that thinks and then waits an iteration, and one that waits and then thinks, meet exactly; which of them is
    first depends on the order of two additions.
    """
    tokens = np.sort(np.concatenate([request.token_s for request in everyone] or [np.zeros(0)]))
    arrivals = np.array([request.arrival_s for request in everyone if request.arrival_s > 0])
    after = np.searchsorted(tokens, arrivals - TIE_S)
    return bool((after < np.searchsorted(tokens, arrivals + TIE_S)).any())


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(1, 60),
    rate=st.sampled_from([0.5, 5.0, 20.0, 200.0]),
    concurrency=st.sampled_from([None, None, 1, 3, 20]),
    ramp_s=st.sampled_from([0.0, 0.0, 0.013, 0.2]),
    think_s=st.sampled_from([0.0, 0.0, 1e-3, 0.11]),
    lag=st.sampled_from([0.0, 0.0, 1.0, 0.37, 2.6]),
    admission=st.sampled_from(ADMISSIONS),
    slots=st.sampled_from([1, 2, 5, 64]),
    budget=st.sampled_from([1, 7, 64, 300, 4096]),
    blocks=st.sampled_from([8, 17, 30, 90, 10_000]),
    block=st.sampled_from([1, 4, 16]),
    chunked=st.booleans(),
    concurrent_batches=st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2), (4, 2)]),
    speed=st.sampled_from([1.0, 1.0, 1.5, 1.7351, 2.0, 2.9]),
    num_priorities=st.sampled_from([1, 1, 3]),
    caches=st.booleans(),
    role=st.sampled_from([Role.MIXED, Role.MIXED, Role.PREFILL, Role.DECODE]),
)
def test_worker_agrees_with_the_reference(
    seed: int,
    num: int,
    rate: float,
    concurrency: int | None,
    ramp_s: float,
    think_s: float,
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
    role: Role,
) -> None:
    requests = random_requests(
        seed,
        num,
        shortest_output=2 if role is Role.DECODE else 1,
        rate_per_s=rate,
        concurrency=concurrency,
        ramp_s=ramp_s,
        think_s=think_s,
        num_priorities=num_priorities,
        cached=caches,
    )
    random = np.random.default_rng(seed)
    cost = linear_cost(
        concurrent_batches=concurrent_batches[0],
        pipeline_parallel=concurrent_batches[1],
        tokens_per_step=speed,
        verified_tokens=math.ceil(speed),
        fixed_s=float(random.uniform(1e-3, 2e-2)),
        token_s=float(random.uniform(1e-6, 1e-4)),
        context_s=float(random.choice([0.0, random.uniform(1e-9, 1e-5)])),
        least_s=float(random.choice([0.0, 1e-2])),
        admission_steps=lag,
    )
    limits = EngineLimits(
        max_num_seqs=slots,
        max_batched_tokens=budget,
        chunked_prefill=chunked,
        prefix_caching=caches,
        admission=admission,
    )
    run = simulate(requests, cost, limits, kv_capacity_tokens=blocks * block, kv_block_tokens=block, role=role)
    everyone, preemptions = reference_run(
        requests, cost, limits, kv_capacity_tokens=blocks * block, kv_block_tokens=block, role=role
    )
    assume(not (think_s and arrives_with_a_token(everyone)))
    assert run.finish_s.tolist() == pytest.approx([request.finish_s for request in everyone], **EQUAL)
    assert run.is_served.tolist() == [math.isfinite(request.finish_s) for request in everyone]
    assert run.num_preemptions == preemptions
    assert run.first_token_s.tolist() == pytest.approx(
        [(request.token_s or [math.inf])[0] for request in everyone], **EQUAL
    )
    assert gap_sums(run) == pytest.approx(reference_gap_sums(everyone), rel=1e-7, abs=1e-10)
