"""Is a deployment within the SLO? It is simulated under a load, and its latencies are held against every limit.

:func:`judge` simulates one load; :class:`HighestRate` looks for the highest Poisson rate at which every SLO is met. A
large deployment of identical workers is simulated in part, with its part of the load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Arrival, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.deployment import serve, server
from meshplan.planner.serving.search.max_rate import RateSearch
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.serving.simulation.metrics import Metrics, summarize
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.slo_attainment import violations

# Relative distance between the highest rate that meets the SLOs and the lowest that does not: about the sampling noise
# of a thousand requests.
RATE_TOLERANCE = 0.02
# Identical workers that are simulated together; more of them are represented by so many, with their share of the load.
MOST_SIMULATED_WORKERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A simulated deployment held against the SLOs.

    Args:
        metrics: as clients see them.
        output_tokens_per_s: rate of all devices; under open arrivals the offered load, since the run's own figure
            includes the time in which the last requests drain.
        requests_per_s: likewise.
        violated: the violated SLOs with their simulated latencies, s; a rejected request violates all.
        run: what was simulated: all workers, or a part of many identical ones.
    """

    metrics: Metrics
    output_tokens_per_s: float
    requests_per_s: float
    violated: tuple[tuple[Slo, float], ...]
    run: ServingRun

    @property
    def worst_violation(self) -> tuple[Slo, float]:
        """The violated SLO whose latency exceeds its limit by the largest factor, and that latency, s."""
        return max(self.violated, key=lambda item: item[1] / item[0].limit_s)


def judge(
    problem: ServingProblem,
    config: ServingConfig,
    *,
    request_rate_per_s: float | None = None,
    num_running: int | None = None,
    seed: int = 0,
    costs: Sequence[StepCost] | None = None,
) -> Judged:
    """Simulate a configuration under the question's load and hold it against every SLO.

    Args:
        problem: the question.
        config: the choices.
        request_rate_per_s: rate of Poisson arrivals, where the question leaves the load free.
        num_running: requests kept in flight instead, over all workers.
        seed: for drawing the requests.
        costs: iteration tables of the pools, if they are known already.
    """
    workload = problem.workload
    if problem.has_free_load and num_running is not None:
        workload = replace(workload, arrival=Arrival.CLOSED_LOOP, concurrency=num_running)
    elif problem.has_free_load:
        workload = replace(workload, arrival=Arrival.POISSON, request_rate_per_s=request_rate_per_s)
    part, part_load, copies = _representative_part(config, workload)
    run = serve(problem.site, part, part_load, seed=seed, costs=costs)
    return _judged(problem, workload, run, part, copies)


class HighestRate(RateSearch):
    """Search for the highest Poisson rate up to ``high_per_s`` at which a configuration meets every SLO.

    It can be stopped at any time: ``met_per_s`` and ``violated_per_s`` are the bracket reached so far.
    """

    def __init__(
        self,
        problem: ServingProblem,
        config: ServingConfig,
        *,
        high_per_s: float,
        seed: int = 0,
        costs: Sequence[StepCost] | None = None,
    ) -> None:
        self.problem = problem
        self.workload = replace(problem.workload, arrival=Arrival.POISSON, request_rate_per_s=high_per_s)
        self.part, part_load, self.copies = _representative_part(config, self.workload)
        super().__init__(
            make_requests(part_load, seed=seed),
            server(problem.site, self.part, part_load, costs=costs),
            problem.slos,
            high_per_s=high_per_s / self.copies,
            tolerance=RATE_TOLERANCE,
        )

    @property
    def met_per_s(self) -> float:
        """Lower end of the bracket: the highest rate tried that meets every SLO; 0 if none has."""
        return self.low * self.copies

    @property
    def violated_per_s(self) -> float:
        """Upper end of the bracket: the lowest rate tried that violates an SLO, or the search limit if none has."""
        return min(self.high, self.most) * self.copies

    @property
    def tokens_per_request(self) -> float:
        """Mean output length of the simulated requests, tokens."""
        return float(self.requests.output_length.mean())

    def narrow(self, rate_per_s: float | None = None) -> None:
        """Simulate one more rate: a given one to its end, or else the next of the search, which may stop early."""
        if rate_per_s is None:
            self.try_rate(self.next_rate())
        else:
            self.try_rate(rate_per_s / self.copies, may_stop_early=False)

    def judged(self) -> Judged:
        """The configuration at the highest rate that meets the SLOs once that is settled, else at one that does not.

        A run that was stopped early is repeated to its end.
        """
        if self.low_run is not None and (self.is_closed or self.high == math.inf):
            return self._judged(self.low_run, self.met_per_s)
        if self.high_run is None:
            self.narrow(self.violated_per_s)
        assert self.high_run is not None  # noqa: S101  (that run was made to its end)
        return self._judged(self.high_run, self.violated_per_s)

    def _judged(self, run: ServingRun, rate_per_s: float) -> Judged:
        at = replace(self.workload, request_rate_per_s=rate_per_s)
        return _judged(self.problem, at, run, self.part, self.copies)


def _judged(
    problem: ServingProblem, workload: ServingWorkload, run: ServingRun, part: ServingConfig, copies: float
) -> Judged:
    """The whole deployment from the run of a part of it: rates and counts in flight scale, latencies do not."""
    metrics = summarize(run, num_devices=part.num_devices)
    if copies != 1.0:
        metrics = replace(
            metrics,
            output_tokens_per_s=copies * metrics.output_tokens_per_s,
            requests_per_s=copies * metrics.requests_per_s,
            mean_in_flight=copies * metrics.mean_in_flight,
            mean_queued=copies * metrics.mean_queued,
        )
    offered = None if workload.arrival is Arrival.CLOSED_LOOP else workload.request_rate_per_s
    each = metrics.output_tokens_per_s / metrics.requests_per_s if metrics.requests_per_s else 0.0
    return Judged(
        metrics=metrics,
        output_tokens_per_s=metrics.output_tokens_per_s if offered is None else offered * each,
        requests_per_s=metrics.requests_per_s if offered is None else offered,
        violated=violations(metrics, problem.slos),
        run=run,
    )


def _representative_part(
    config: ServingConfig, workload: ServingWorkload
) -> tuple[ServingConfig, ServingWorkload, float]:
    """A part of a large deployment with its part of the load, and how many such parts there are.

    Splitting Poisson arrivals at random gives Poisson arrivals; a router that knows the load does better, so the part
    is no faster than the whole. Several kinds behind one router are divided by a common divisor of their numbers, as
    far as :data:`MOST_SIMULATED_WORKERS` are left. Traces, shared prefixes, and prefill with decode stay whole.
    """
    workers = config.num_workers
    is_one = workload.trace is not None or workload.num_prefixes is not None
    if config.is_disaggregated or workers <= MOST_SIMULATED_WORKERS or is_one:
        return config, workload, 1.0
    each = [pool.num_workers for pool in config.pools]
    if len(each) == 1:
        copies, part_of_each = workers / MOST_SIMULATED_WORKERS, [MOST_SIMULATED_WORKERS]
    else:
        divisors = [d for d in range(1, math.gcd(*each) + 1) if math.gcd(*each) % d == 0]
        whole = max(d for d in divisors if d == 1 or workers // d >= MOST_SIMULATED_WORKERS)
        copies, part_of_each = float(whole), [number // whole for number in each]
    rate, concurrency = workload.request_rate_per_s, workload.concurrency
    part = replace(
        workload,
        request_rate_per_s=None if rate is None else rate / copies,
        concurrency=None if concurrency is None else max(round(concurrency / copies), 1),
        num_requests=max(round((workload.num_requests or 1) / copies), 1)
        if workload.arrival is Arrival.ALL_AT_ONCE
        else workload.num_requests,
    )
    pools = (replace(pool, num_workers=number) for pool, number in zip(config.pools, part_of_each, strict=True))
    return replace(config, pools=tuple(pools)), part, copies
