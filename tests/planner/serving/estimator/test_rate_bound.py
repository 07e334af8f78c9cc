"""No simulation is faster than the bound with which the search prunes, and no schedule of whole prompts is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from simulation_cases import linear_cost

from meshplan.planner.serving.estimator.bounds.rate_bound import (
    Work,
    least_at_random_s,
    least_request_s,
    least_tpot_s,
    least_within_s,
)
from meshplan.planner.serving.estimator.steady_state import running_counts
from meshplan.planner.serving.estimator.step_cost import StepCost, beside_the_front_end
from meshplan.planner.serving.problem.config import EngineLimits, Role
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.simulation.engine import simulate

# A run of finitely many requests: means of contexts and of the tokens of a step are met to so much.
NOISE = 0.003
MOST = 512


@dataclass(frozen=True, kw_only=True)
class Case:
    """A worker, its requests and how many of them are in flight."""

    cost: StepCost
    work: Work
    in_flight: int

    def run(self, rng: np.random.Generator, rate_per_s: float | None) -> tuple[float, float]:
        """Requests/s and mean time per output token of a closed loop, or of Poisson arrivals at a rate."""
        # Under open arrivals many stays, so that the start from an empty worker hardly counts.
        work, num = self.work, max(3 * self.in_flight, 150) if rate_per_s is None else 1500
        gaps = np.zeros(num) if rate_per_s is None else rng.exponential(1.0 / rate_per_s, num)
        requests = Requests(
            arrival_s=np.cumsum(gaps),
            input_length=np.full(num, int(work.prompt)),
            output_length=np.full(num, int(work.output)),
            concurrency=self.in_flight if rate_per_s is None else None,
            cached_tokens=np.full(num, int(work.cached)),
        )
        limits = EngineLimits(
            max_num_seqs=MOST, max_batched_tokens=work.budget, chunked_prefill=work.chunked, prefix_caching=True
        )
        room = 16 * num * int(work.prompt + work.output + 40)
        run = simulate(requests, self.cost, limits, kv_capacity_tokens=room, role=work.role)
        decoding_s = float((run.finish_s - run.first_token_s).mean())
        return num / float(run.finish_s.max()), decoding_s / max(work.output - 1.0, 1.0)


def random_case(rng: np.random.Generator) -> Case:
    """Memory-bound and compute-bound workers, prompts from 16 to 2,048 tokens, answers from 2 to 128."""
    batches, verified = int(rng.choice([1, 1, 2, 4])), int(rng.choice([1, 1, 2, 4]))
    cost = linear_cost(
        most_seqs=2 * MOST,
        most_tokens=16384,
        concurrent_batches=batches,
        pipeline_parallel=int(rng.choice([1, batches])),
        verified_tokens=verified,
        tokens_per_step=1.0 if verified == 1 else float(rng.uniform(1.0, verified)),
        fixed_s=10 ** rng.uniform(-3.0, -1.7),
        token_s=10 ** rng.uniform(-6.0, -4.5),
        context_s=10 ** rng.uniform(-9.0, -7.0),
        pair_s=10 ** rng.uniform(-10.0, -8.5),
        least_s=float(rng.choice([0.0, 0.01, 0.03])),
    )
    dense, knee = np.array(cost.dense_s), int(rng.choice([0, 200, 400]))
    cost = replace(cost, dense_s=np.maximum(dense, dense[knee]).tolist(), graphed_tokens=int(rng.choice([0, 256, 512])))
    prompt = int(2 ** rng.uniform(4.0, 11.0))
    cost = replace(cost, launches_ahead=prompt % 2 == 0)
    if prompt % 3 == 0:
        cost = beside_the_front_end(
            cost, 10 ** rng.uniform(-5.0, -3.0), (float(prompt), float(prompt + 128)), shortest=float(prompt)
        )
    work = Work(
        role=Role.MIXED if rng.random() < 0.7 else Role(rng.choice([Role.PREFILL.value, Role.DECODE.value])),
        prompt=prompt,
        output=int(2 ** rng.uniform(1.0, 7.0)),
        cached=int(rng.choice([0.0, 0.0, 0.5, 0.9]) * prompt),
        budget=int(2 ** rng.uniform(9.0, 13.0)),
        chunked=bool(rng.random() < 0.7),
    )
    return Case(cost=cost, work=work, in_flight=int(2 ** rng.uniform(0.0, 8.0)))


@pytest.mark.parametrize("seed", range(4))
def test_many_iterations_cost_what_each_does(seed: int) -> None:
    """The bound reads iterations in arrays, the simulation one by one."""
    rng = np.random.default_rng(seed)
    cost = replace(random_case(rng).cost, launches_ahead=False, front_end_s=0.0)
    decodes, prompts = rng.integers(0, MOST, 200), rng.integers(0, 9, 200)
    tokens = prompts * rng.integers(1, 900, 200)
    context, pairs = decodes * rng.uniform(1.0, 4000.0, 200), tokens * rng.uniform(1.0, 900.0, 200)
    some = decodes + prompts > 0
    rows = [one[some] for one in (decodes, context, prompts, tokens, pairs)]
    each = [cost.step_s(int(n), float(c), int(k), int(t), float(q)) for n, c, k, t, q in zip(*rows, strict=True)]
    assert cost.steps_s(*rows) == pytest.approx(each)
    streamed = beside_the_front_end(cost, 10 ** rng.uniform(-5.0, -3.0), (1000.0, 1128.0))
    for other in (replace(cost, launches_ahead=True), streamed, replace(streamed, launches_ahead=True)):
        least = other.steps_s(*rows)
        each = [other.step_s(int(n), float(c), int(k), int(t), float(q)) for n, c, k, t, q in zip(*rows, strict=True)]
        assert (least <= np.array(each) * (1.0 + 1e-12)).all()
    assert (replace(cost, launches_ahead=True).steps_s(*rows) <= cost.steps_s(*rows)).all()


@pytest.mark.parametrize("seed", [*range(36), 101])
def test_no_simulation_exceeds_the_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    cost, work, counts = case.cost, case.work, running_counts(MOST)
    at = int(np.searchsorted(counts, case.in_flight))
    request_s = least_request_s(cost, work, counts)
    rate, tpot = case.run(rng, None)
    assert rate * request_s[at] <= 1.0 + NOISE
    if work.role is not Role.MIXED:
        return
    assert least_tpot_s(cost, work, counts, request_s)[at] <= tpot * (1.0 + NOISE)
    assert rate * least_within_s(cost, work, counts, tpot * (1.0 + NOISE)) <= 1.0 + NOISE
    offered = rng.uniform(0.3, 0.95) / request_s[-1]
    rate, tpot = case.run(rng, offered)
    assert rate * least_within_s(cost, work, counts, tpot * (1.0 + NOISE)) <= 1.0 + NOISE
    assert rate * least_at_random_s(cost, work, counts, tpot * (1.0 + NOISE)) <= 1.0 + NOISE


def test_many_short_prompts_share_an_iteration() -> None:
    """64 tokens in, 64 out, 512 in flight: the steady state, one prompt an iteration, was given as a bound."""
    cost = linear_cost(most_seqs=1024, fixed_s=6e-3, token_s=2e-6, pair_s=1e-10, least_s=6e-3)
    work = Work(role=Role.MIXED, prompt=64, output=64, budget=8192)
    rate, _ = Case(cost=cost, work=work, in_flight=512).run(np.random.default_rng(0), None)
    bound = 1.0 / least_request_s(cost, work, np.arange(1, 513))[-1]
    assert 0.93 * bound < rate < bound


@pytest.mark.parametrize("seed", range(15))
def test_no_mixture_of_whole_prompts_is_faster(seed: int) -> None:
    """Every two compositions of up to eight requests: a linear program of two equations mixes no more than two."""
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    work = replace(case.work, role=Role.MIXED, cached=0.0, prompt=min(case.work.prompt, 100), chunked=True)
    cost, most = replace(case.cost, concurrent_batches=1, pipeline_parallel=1), int(rng.integers(1, 9))
    room = work.budget
    mixed = [
        (m, q)
        for m, q in itertools.product(range(most + 1), repeat=2)
        if 0 < m + q <= most and q * work.prompt + m * cost.verified_tokens <= room
    ]
    pairs = work.prompt * (work.prompt + 1.0) / 2.0
    seconds = [cost.step_s(m, m * work.context(cost), q, int(q * work.prompt), q * pairs) for m, q in mixed]
    decodes, best = work.decodes(cost), np.inf
    for ((m, q), t), ((n, p), u) in itertools.permutations(zip(mixed, seconds, strict=True), 2):
        if (scale := m * p - n * q) > 0:  # x·m + y·n = decodes, x·q + y·p = 1
            x, y = (decodes * p - n) / scale, (m - decodes * q) / scale
            best = min(best, x * t + y * u if min(x, y) >= 0.0 else np.inf)
    bound = least_request_s(cost, work, np.arange(1, most + 1))[-1]
    assert bound <= best * (1.0 + 1e-6)
    assert np.isfinite(best) == (most > 1 or decodes > 0.0)


def test_many_iterations_are_priced_like_each() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        cost = replace(random_case(rng).cost, launches_ahead=False, front_end_s=0.0)
        seqs, prompts = rng.integers(0, 200, 50), rng.integers(0, 9, 50)
        tokens = prompts * rng.integers(1, 200, 50)
        contexts, pairs = 1000.0 * seqs, 80.0 * tokens
        filled = seqs + prompts > 0
        each = [
            cost.step_s(*(part.item() for part in one))
            for one in zip(seqs, contexts, prompts, tokens, pairs, strict=True)
        ]
        together = cost.steps_s(seqs, contexts, prompts, tokens, pairs)
        assert together[filled] == pytest.approx(np.array(each)[filled], rel=1e-12)
