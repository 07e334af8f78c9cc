"""Workers in closed form: iteration times, steady states, and the loads at which they meet the SLOs.

What a worker may reach at most is bounded by :mod:`meshplan.planner.serving.estimator.bounds.rate_bound`: rates from
above, mean times per token from below; and by :mod:`meshplan.planner.serving.estimator.bounds.lone_requests`: latencies
of requests that are alone, each percentile by the requests that it speaks of. A limit on a percentile of the time per
token is taken as one on the mean, which can only be less strict where times scatter evenly. So what violates an SLO
there violates it in the simulation too. What a worker is expected to reach, and with how many requests running, is the
estimate of :mod:`meshplan.planner.serving.estimator.steady_state`: nothing is cut by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.constants.power import PowerConstants
from meshplan.planner.cluster.power import DeviceWork, average_power_w
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.bounds.lone_requests import Alone, lone_requests
from meshplan.planner.serving.estimator.bounds.rate_bound import (
    Work,
    least_at_random_s,
    least_request_s,
    least_token_s,
    least_tpot_s,
    least_within_s,
)
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.pools import pool_worker, scheduled
from meshplan.planner.serving.estimator.power.work import request_work
from meshplan.planner.serving.estimator.steady_state import SteadyState, prefill_s, steady_state
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.search.deployment import tokenize_s
from meshplan.planner.serving.search.layouts import PlacedWorker, placed_workers, with_chunk, with_more_running

# Chunks of prefill are made smaller by this factor, down to the least that keeps products compute-bound.
CHUNK_STEP, LEAST_CHUNK = 2, 512


@dataclass(frozen=True, kw_only=True)
class PricedWorker:
    """A worker with the tables of its iterations and its steady states.

    Args:
        placed: layout, formats, memory.
        worker: the same as the estimator takes it.
        cost: tables of its iteration times.
        steady: estimated steady states by running requests.
        feasible: [N] whether they meet every SLO at that number of running requests.
        most_rate_per_s: [N] no more requests/s are finished with that number kept in flight: a bound, 0 where no load
            meets the SLOs.
        may_meet: [N] the bounds do not rule out that every SLO is met with that number kept in flight.
        best_rate_per_s: no more requests/s are finished within the SLOs: a bound, 0 where no load meets them.
        least_token_s: least time between two tokens of a request, without prompts beside it; 0 where none are decoded.
        first_token_s: TTFT of a request of mean length on an idle worker.
        alone: least latencies of its requests on an idle worker.
        work: what a request asks of it.
        cached: prompt tokens of a request that the prefix cache holds.
        capped: its scheduler runs fewer requests than its cache holds, so that the time between tokens stays short.
    """

    placed: PlacedWorker
    worker: Worker
    cost: StepCost
    steady: SteadyState
    feasible: NDArray[np.bool_]
    most_rate_per_s: FloatArray
    may_meet: NDArray[np.bool_]
    best_rate_per_s: float
    least_token_s: float
    first_token_s: float
    alone: Alone
    work: Work
    cached: float = 0.0
    capped: bool = False

    @property
    def num_devices(self) -> int:
        """Devices of one worker, or instances of devices that are cut."""
        return self.placed.num_devices

    @property
    def device_share(self) -> float:
        """Devices of one worker, whole ones: a part of one where it is cut."""
        return self.num_devices / self.placed.machine.instances_per_device

    @property
    def expected_rate_per_s(self) -> float:
        """Most requests/s within the SLOs by the estimate, 0 where no load meets them."""
        return float(self.steady.rate_per_s[self.feasible].max(initial=0.0))

    def cost_within(self, max_num_seqs: int) -> StepCost:
        """Its tables where the scheduler runs at most so many requests: fewer graphs, else the same.

        Under a power limit the largest batch counts too, so that they are made anew.
        """
        limits = self.worker.limits
        if max_num_seqs == limits.max_num_seqs:
            return self.cost
        worker = replace(self.worker, limits=replace(limits, max_num_seqs=max_num_seqs))
        if worker.slowdown is not None:
            return worker.step_cost()
        return replace(self.cost, graphed_tokens=worker.captured_tokens)

    @cached_property
    def least_prompt_s(self) -> float:
        """Least time of the worker for a prompt, s, though it did nothing else: 1/s bounds its first tokens/s."""
        prompts = replace(self.work, role=Role.PREFILL)
        return float(least_request_s(self.cost, prompts, self.steady.num_seqs).min())

    @cached_property
    def work_per_request(self) -> DeviceWork:
        """[N] Work of one of its devices for a request, by running requests."""
        # A replica is priced by the kernels of the whole device; what it draws is that of its part.
        worker = replace(self.worker, machine=self.placed.machine) if self.placed.is_shared else self.worker
        return request_work(worker, self.steady.num_seqs.astype(np.float64), cached=self.cached, padded=True)

    def power_w(self, rate_per_s: float, constants: PowerConstants) -> float | None:
        """Average power of all its devices where it finishes so many requests/s, W; None without a known limit, and
        where MLPs or experts lie apart, whose watts no run tells.
        """
        if self.placed.ffn is not None:
            return None
        reached = np.maximum.accumulate(self.steady.rate_per_s)
        use = self.work_per_request.at(rate_per_s, reached).times(rate_per_s)
        device, cap = self.placed.machine.device, self.placed.power_cap_w
        watts = average_power_w(device, constants, use, cap_w=cap)
        return None if watts is None else watts * self.num_devices


def priced_workers(
    problem: ServingProblem, role: Role, rejected: Counter[str], check: Callable[[], None] | None = None
) -> list[PricedWorker]:
    """Every worker of a role with its steady states; those that violate an SLO at every load are rejected.

    Args:
        problem: the question.
        role: of the workers.
        rejected: reason → number of workers rejected for it; updated.
        check: raises where the time is over: a rack has hundreds of workers, a hundredth of a second each.
    """
    found = []
    for placed in placed_workers(problem, role, rejected):
        if check is not None:
            check()
        worker = price_worker(problem, placed)
        kinds = [worker, *_faster_chunks(problem, worker)]
        larger = _more_running(problem, worker)
        kinds += [] if larger is None else [larger, *_faster_chunks(problem, larger)]
        feasible = [kind for kind in kinds if kind.best_rate_per_s > 0.0]
        found += feasible
        if not feasible:
            rejected[_violated_slo(problem, worker)] += 1
    return found


def smaller_chunk(problem: ServingProblem, placed: PlacedWorker) -> PlacedWorker | None:
    """A mixed worker with the next smaller chunks of prefill; None where they are pinned or as small as they may be."""
    pinned, ranks = problem.pinned.of(placed.role), placed.layout.attention_data_parallel
    chunk = max(placed.limits.max_batched_tokens // CHUNK_STEP, LEAST_CHUNK, pinned.get("max_num_seqs", 0) // ranks)
    is_fixed = "max_batched_tokens" in pinned or problem.recipe.whole_prompts or problem.shape.keeps_prompts_whole
    if (
        placed.weight_tiers is not None
        or placed.role is not Role.MIXED
        or is_fixed
        or chunk >= placed.limits.max_batched_tokens
    ):
        return None
    smaller = with_chunk(problem, placed, chunk)
    if smaller is None:
        return None
    # The room that smaller activations leave is not given to more requests: the tables of iterations end there.
    most = min(smaller.limits.max_num_seqs, placed.limits.max_num_seqs)
    return replace(smaller, limits=replace(smaller.limits, max_num_seqs=most))


def _faster_chunks(problem: ServingProblem, worker: PricedWorker) -> Iterator[PricedWorker]:
    """The worker with smaller chunks, each where its closed form allows a higher rate than all larger ones: under an
    SLO on the time between tokens it may, unless decodes alone exceed it: their iterations hold no chunk. The others
    are looked at where the larger chunk violates that SLO.
    """
    # Under a power limit the largest iteration has a say in the clocks of the others.
    if worker.least_token_s > problem.tpot_limit_s and worker.worker.slowdown is None:
        return
    best, placed = worker.best_rate_per_s, smaller_chunk(problem, worker.placed)
    while placed is not None:
        smaller = price_worker(problem, placed)
        if smaller.best_rate_per_s > best:
            best = smaller.best_rate_per_s
            yield smaller
        placed = smaller_chunk(problem, placed)


def _more_running(problem: ServingProblem, worker: PricedWorker) -> PricedWorker | None:
    """The worker with more running requests than its engine starts with on such a board; None where its closed form
    allows no higher rate with them, or it carries all that is asked without.
    """
    asked = problem.workload.request_rate_per_s
    if asked is not None and worker.best_rate_per_s >= asked:
        return None
    placed = with_more_running(problem, worker.placed)
    larger = None if placed is None else price_worker(problem, placed)
    return larger if larger is not None and larger.best_rate_per_s > worker.best_rate_per_s else None


def price_worker(problem: ServingProblem, placed: PlacedWorker) -> PricedWorker:
    """Iteration times, steady states and the loads that meet every SLO.

    The tables are the worker's own: those of larger batches have other knots and other graphs, and would price it
    otherwise than the configuration that the plan names.
    """
    workload, constants = problem.workload, problem.calibrations[placed.node_type].constants
    pool = pool_of(problem, placed, 1)
    worker = pool_worker(problem.site, pool, workload, problem.speculation)
    cost = worker.step_cost()
    limits = scheduled(pool, problem.recipe, workload)
    prompt, output = workload.mean_lengths
    cached = prompt * workload.prefix_hit_rate
    steady = steady_state(
        cost,
        role=placed.role,
        prompt=prompt,
        output=output,
        cached=cached,
        budget=limits.max_batched_tokens,
        most=placed.limits.max_num_seqs,
    )

    def first_s(tokens: float, found: float) -> float:
        seconds = prefill_s(cost, tokens, cached=found, budget=limits.max_batched_tokens)
        return seconds + constants.first_token_offset_s + float(tokenize_s(workload, np.asarray(tokens)))

    alone = lone_requests(workload).alone(first_s)
    feasible = np.ones(len(steady.num_seqs), dtype=bool)
    if placed.role is not Role.PREFILL:
        between_s = alone.most_between_s(problem.slos, before=cost.admission_steps)
        feasible &= steady.tpot_s <= min(problem.tpot_limit_s, between_s)
    if placed.role is not Role.DECODE:
        feasible &= cost.admission_steps * steady.tpot_s <= alone.left_s(problem.slos)
    work = Work(
        role=placed.role,
        prompt=prompt,
        output=output,
        cached=cached,
        budget=limits.max_batched_tokens,
        chunked=limits.chunked_prefill,
    )
    differ = workload.trace is not None or workload.input_lengths is not None or workload.output_lengths is not None
    shortest = replace(work, prompt=workload.shortest_prompt, output=1.0) if differ else work
    between = 0.0 if placed.role is Role.PREFILL else least_token_s(cost, shortest, steady.num_seqs)
    most, may_meet, best = _bounds(problem, cost, work, steady.num_seqs, alone=alone, token_s=between)
    return PricedWorker(
        placed=placed,
        worker=worker,
        cost=cost,
        steady=steady,
        feasible=feasible,
        most_rate_per_s=most,
        may_meet=may_meet,
        best_rate_per_s=best,
        least_token_s=between,
        first_token_s=first_s(prompt, cached) + cost.admission_steps * float(steady.tpot_s[0]),
        alone=alone,
        work=work,
        cached=cached,
    )


def _bounds(
    problem: ServingProblem, cost: StepCost, work: Work, counts: NDArray[np.int64], *, alone: Alone, token_s: float
) -> tuple[FloatArray, NDArray[np.bool_], float]:
    """Bounds of a worker by requests in flight, and on its rate within the SLOs; see :class:`PricedWorker`.

    Poisson arrivals see the time average of the requests that decode, so that prompts delay as many; other arrivals may
    fall in step.

    Args:
        problem: the question.
        cost: iteration times.
        work: of a request.
        counts: [N] requests in flight.
        alone: least latencies.
        token_s: least time between tokens.
    """
    steps = max(work.output - 1.0, 0.0)
    stays = alone if work.role is Role.MIXED else replace(alone, first_s=np.zeros_like(alone.first_s))
    decodes = work.role is not Role.PREFILL and steps > 0.0
    limit = min(problem.tpot_limit_s, stays.most_between_s(problem.slos)) if decodes else float("inf")
    if (work.role is not Role.DECODE and alone.left_s(problem.slos) < 0.0) or token_s > limit:
        return np.zeros(len(counts)), np.zeros(len(counts), dtype=bool), 0.0
    request_s = least_request_s(cost, work, counts)
    most, fastest = 1.0 / request_s, 1.0 / float(request_s[-1])
    if limit == float("inf"):
        return most, np.ones(len(counts), dtype=bool), fastest
    may_meet = least_tpot_s(cost, work, counts, request_s) <= limit
    within = 1.0 / least_within_s(cost, work, counts, limit)
    if within and work.role is Role.MIXED and problem.has_poisson_arrivals:
        within = min(within, 1.0 / least_at_random_s(cost, work, counts, limit))
    return most, may_meet, min(within, fastest)


def _violated_slo(problem: ServingProblem, worker: PricedWorker) -> str:
    """The SLO that a worker violates with one request running, as a reason for its rejection."""
    if worker.placed.role is not Role.PREFILL and worker.steady.tpot_s[0] > problem.limit_s("tpot"):
        return "time per output token is above its SLO with one request running"
    if worker.alone.left_s(slo for slo in problem.slos if slo.metric == "ttft") < 0.0:
        return "time to first token is above its SLO for one request alone"
    return "an SLO on latency is violated with one request running"


def pool_of(problem: ServingProblem, placed: PlacedWorker, num_workers: int, num_running: int | None = None) -> Pool:
    """A pool of identical workers; ``num_running`` caps the requests of each."""
    limits = placed.limits
    if num_running is not None:
        ranks = placed.layout.attention_data_parallel
        limits = replace(limits, max_num_seqs=min(-(-num_running // ranks) * ranks, limits.max_num_seqs))
    return Pool(
        role=placed.role,
        layout=placed.layout,
        num_workers=num_workers,
        limits=limits,
        quantization=placed.quantization,
        node_type=placed.node_type,
        power_cap_w=placed.power_cap_w,
        weight_tiers=placed.weight_tiers,
        ffn=placed.ffn,
        share=problem.share,
        kv_tier=problem.kv_tier if placed.role is Role.MIXED and placed.limits.prefix_caching else None,
    )
