"""Is a deployment within the SLO? It is simulated under a load, its latencies are held against every limit, and what
it finishes against the rate at which requests arrive.

:func:`judge` simulates one load; :class:`HighestRate` looks for the highest rate at which every SLO is met. How
long a simulation is, and when it decides, is in :mod:`meshplan.planner.serving.search.trials`. A large deployment of
identical workers is simulated in part, with its part of the load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import STUDENT_95
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import ServingConfig
from meshplan.planner.serving.problem.problem import MAX_UTILIZATION, ServingProblem
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.deployment import server
from meshplan.planner.serving.search.max_rate import RateSearch
from meshplan.planner.serving.search.trials import FEWEST, Effort, Load, Trial, tried
from meshplan.planner.serving.simulation.arrivals import default_num_requests, make_requests, scaled
from meshplan.planner.serving.simulation.metrics import (
    DECISION_T,
    NUM_BATCHES,
    Metrics,
    summarize,
)
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.slo_attainment import Pace, latency_interval

# Relative distance between the highest rate that meets the SLOs and the lowest that is not shown to.
RATE_TOLERANCE = 0.02
# Identical workers that are simulated together; more of them are represented by so many, with their share of the load.
MOST_SIMULATED_WORKERS = 4
# Batches of requests that tell a rate: fewer have no spread.
FEWEST_BATCHES = 3
# Key of a spec by which requests arrive at a rate.
RATE_KEY = "request_rate_per_s"
# Arrivals of which a question may ask for any number.
OPEN_ENDED = (Arrival.POISSON, Arrival.GAMMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Something that was asked for and that a deployment does not do.

    Args:
        key: of the spec.
        text: in words, with the numbers.
        ratio: what is over what was asked, above 1; ∞ where it has no bound.
    """

    key: str
    text: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A simulated deployment held against the SLOs.

    Args:
        metrics: as clients see them, after the warm-up.
        output_tokens_per_s: rate of all devices; under open arrivals the offered load, since the run's own figure
            includes the time in which the last requests drain; where the queue is shown to grow, what is finished
            while requests arrive (:meth:`finishing` limits it).
        requests_per_s: likewise.
        interval_s: SLO → the interval by which it is decided, s.
        violated: the SLOs that are not shown to hold, with their simulated latencies, s: the upper end of the interval
            where the latency itself is within the limit. A rejected request violates all.
        run: what was simulated and measured: all workers, or a part of many identical ones.
        rate_error: relative half-width of the 95 % interval of the rates where they are simulated, 0 where the load is
            offered; the width of the bracket where the highest rate was searched for.
        is_settled: the SLOs are held against what a longer run of other requests would show; of deployments that are
            not chosen only the search's shorter runs tell.
        refuted_per_s: the lowest rate that was shown to violate an SLO, where the highest rate was searched for.
        is_exact: the number of requests was given, so that latencies are what that run says.
        offered_per_s: requests/s that arrive by themselves and are not finished as fast, or not for certain; None where
            the deployment keeps pace.
        pace: what the run says of the queue; None where requests do not arrive by themselves, or too few tell.
    """

    metrics: Metrics
    output_tokens_per_s: float
    requests_per_s: float
    interval_s: Mapping[Slo, tuple[float, float]]
    violated: tuple[tuple[Slo, float], ...]
    run: ServingRun
    rate_error: float = 0.0
    refuted_per_s: float | None = None
    is_settled: bool = True
    is_exact: bool = False
    offered_per_s: float | None = None
    pace: Pace | None = None

    @property
    def is_met(self) -> bool:
        """Every SLO holds, and requests are finished as fast as they arrive."""
        return not self.violated and self.offered_per_s is None

    @property
    def num_misses(self) -> int:
        """SLOs that are not shown to hold, and the rate where it is not kept pace with."""
        return len(self.violated) + (self.offered_per_s is not None)

    @property
    def worst_miss(self) -> Miss:
        """What is missed by the largest factor: an SLO, or where all hold the rate."""
        if self.violated:
            slo, latency_s = max(self.violated, key=lambda item: item[1] / item[0].limit_s)
            # Within the limit in this run, and not shown to stay there in others.
            text = ("up to " if self.metrics.value(slo) <= slo.limit_s else "") + slo.excess_text(latency_s)
            return Miss(key=slo.key, text=text, ratio=latency_s / slo.limit_s)
        offered, finished = self.offered_per_s or 0.0, self.requests_per_s
        text = f"at {offered:g} requests/s its queue is not shown to stop growing"
        if finished < offered:
            text = f"it finishes {finished:.3g} requests/s of the {offered:g} offered, so that its queue only grows"
        return Miss(key=RATE_KEY, text=text, ratio=offered / finished if finished > 0.0 else math.inf)

    @property
    def worst_ratio(self) -> float:
        """The largest latency/limit at the upper ends of the intervals; 0 without an SLO."""
        return max((high / slo.limit_s for slo, (_, high) in self.interval_s.items()), default=0.0)

    def finishing(self, most_per_s: float) -> Self:
        """The same where no more requests/s are finished than ``most_per_s``, however many clients send."""
        if self.requests_per_s <= most_per_s:
            return self
        share = most_per_s / self.requests_per_s
        return replace(self, requests_per_s=most_per_s, output_tokens_per_s=share * self.output_tokens_per_s)

    def shown_s(self, slo: Slo) -> float:
        """The least limit, s, under which the latency of an SLO would be shown to hold."""
        exact = self.metrics.value(slo)
        return exact if self.is_exact else max(exact, latency_interval(self.run, slo, DECISION_T)[1])


def judge(
    problem: ServingProblem,
    config: ServingConfig,
    *,
    request_rate_per_s: float | None = None,
    num_running: int | None = None,
    num_requests: int | None = None,
    supply_per_s: float = math.inf,
    effort: Effort = Effort.DECIDE,
    seed: int = 0,
    costs: Sequence[StepCost] | None = None,
) -> Judged:
    """Simulate a configuration under the question's load and hold it against every SLO.

    Args:
        problem: the question.
        config: the choices.
        request_rate_per_s: rate of arrivals, where the question leaves the load free.
        num_running: requests kept in flight instead, over all workers.
        num_requests: of one run, where nothing depends on its verdict; None: as the question says, or the confidence.
        supply_per_s: highest rate of the configuration by the closed form: near it a run has to be long.
        effort: whether longer runs keep the SLOs, or only whether the deployment is worth that question.
        seed: for drawing the requests.
        costs: iteration tables of the pools, if they are known already.
    """
    workload = problem.workload
    if problem.has_free_load and num_running is not None:
        workload = replace(workload, arrival=Arrival.CLOSED_LOOP, concurrency=num_running)
    elif problem.has_free_load:
        workload = replace(workload, arrival=workload.open_arrival, request_rate_per_s=request_rate_per_s)
    if num_requests is not None and workload.num_requests is None:
        workload = replace(workload, num_requests=num_requests)
    part, part_load, copies = _representative_part(config, workload)
    serve = server(problem.site, part, part_load, costs=costs)
    load = _load(part_load, seed, (workload.request_rate_per_s or 0.0) / supply_per_s)
    trial = tried(load, serve, problem.slos, may_stop_early=False, effort=effort)
    found = _judged(problem, workload, trial, part, copies)
    return replace(found, is_settled=trial.is_exact or effort is Effort.DECIDE)


class HighestRate(RateSearch):
    """Search for the highest rate of arrivals, Poisson or as uneven as the question says, that meets every SLO.

    ``high_per_s`` is its highest rate by the closed form, of which :data:`MAX_UTILIZATION` may be used: nearer to it
    queues rise and fall more slowly than a run can show. ``tolerance`` is the relative width of the closed bracket.

    It can be stopped at any time: ``met_per_s`` and ``violated_per_s`` are the bracket reached so far. Its runs are
    those of a search (:class:`~meshplan.planner.serving.search.trials.Effort`); :meth:`settle` holds the answer against
    longer ones. ``check`` raises within a run where the time is over.
    """

    def __init__(
        self,
        problem: ServingProblem,
        config: ServingConfig,
        *,
        high_per_s: float,
        tolerance: float = RATE_TOLERANCE,
        seed: int = 0,
        costs: Sequence[StepCost] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.problem, self.check = problem, check
        arrival = problem.workload.open_arrival
        self.workload = replace(problem.workload, arrival=arrival, request_rate_per_s=high_per_s)
        self.part, part_load, self.copies = _representative_part(config, self.workload)
        self.drawn = _load(part_load, seed)
        self.supply_per_s = high_per_s / self.copies
        self.serve = server(problem.site, self.part, part_load, costs=costs)
        self.is_settled = self.drawn.given is not None
        super().__init__(self._attempt, high_per_s=MAX_UTILIZATION * self.supply_per_s, tolerance=tolerance)

    def _attempt(self, rate_per_s: float, may_stop_early: bool, effort: Effort) -> Trial:
        at_rate = replace(
            self.drawn,
            requests=lambda num: scaled(self.drawn.requests(num), rate_per_s),
            utilization=rate_per_s / self.supply_per_s,
        )
        slos, check = self.problem.slos, self.check
        return tried(at_rate, self.serve, slos, may_stop_early=may_stop_early, effort=effort, check=check)

    @property
    def met_per_s(self) -> float:
        """Lower end of the bracket: the highest rate tried that meets every SLO; 0 if none has."""
        return self.low * self.copies

    @property
    def violated_per_s(self) -> float:
        """Upper end of the bracket: the lowest rate tried that is not shown to, or the limit if all are."""
        return min(self.high, self.most) * self.copies

    @property
    def refuted_per_s(self) -> float:
        """The lowest rate tried that is shown to violate an SLO, or the search limit if none is."""
        return min(self.refuted, self.most) * self.copies

    @property
    def tokens_per_request(self) -> float:
        """Mean output length of a request, tokens."""
        return self.workload.mean_lengths[1]

    def start_from(self, rate: float, ratio: float) -> None:
        """Begin at a rate of the whole deployment, requests/s, that is known to meet the SLOs."""
        super().start_from(rate / self.copies, ratio)

    def settle(self) -> Self:
        """Hold the highest rate found against longer runs; where the question gives their length there are none."""
        if self.is_settled:
            return self
        self.is_settled = True
        return super().settle()

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
        if self.low_trial is not None and (self.is_settled or self.is_closed or self.high == math.inf):
            return self._judged(self.low_trial, self.met_per_s)
        trial = self.high_trial
        if trial is None or trial.run is None:
            rate = min(self.high, self.most)
            trial = self.low_trial if self.try_rate(rate, may_stop_early=False) else self.high_trial
        assert trial is not None  # noqa: S101  (that run was made to its end)
        return self._judged(trial, self.violated_per_s)

    def met(self) -> Judged:
        """The configuration at the highest rate tried that meets the SLOs, whatever the rates above it do."""
        assert self.low_trial is not None  # noqa: S101  (there is such a rate, and its run was made to its end)
        return self._judged(self.low_trial, self.met_per_s)

    def _judged(self, trial: Trial, rate_per_s: float) -> Judged:
        at = replace(self.workload, request_rate_per_s=rate_per_s)
        found = _judged(self.problem, at, trial, self.part, self.copies)
        return replace(found, rate_error=RATE_TOLERANCE, refuted_per_s=self.refuted_per_s, is_settled=self.is_settled)


def _load(workload: ServingWorkload, seed: int, utilization: float = 0.0) -> Load:
    """The requests of a workload; in any number where arrivals go on and the question gives no number."""

    def drawn(num: int) -> Requests:
        return make_requests(replace(workload, num_requests=num), seed=seed)

    given = workload.num_requests
    if given is None and workload.arrival not in OPEN_ENDED:
        given = max(default_num_requests(workload), FEWEST)
    return Load(
        requests=drawn,
        given=given,
        num_prefixes=workload.num_prefixes or 0,
        utilization=utilization,
        goes_on=workload.arrival in OPEN_ENDED,
    )


def _judged(
    problem: ServingProblem, workload: ServingWorkload, trial: Trial, part: ServingConfig, copies: float
) -> Judged:
    """The whole deployment from a trial of a part of it: rates and counts in flight scale, latencies do not."""
    run = trial.run
    assert run is not None  # noqa: S101  (the trial was made to its end)
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
    finished = offered
    if offered is not None and trial.pace is not None and trial.pace.is_lost:
        finished = trial.pace.finished_per_s(offered)
    return Judged(
        metrics=metrics,
        output_tokens_per_s=metrics.output_tokens_per_s if finished is None else finished * workload.mean_lengths[1],
        requests_per_s=metrics.requests_per_s if finished is None else finished,
        interval_s=trial.interval_s,
        violated=tuple(
            (slo, metrics.value(slo) if not slo.is_met(metrics.value(slo)) else high)
            for slo, (_, high) in trial.interval_s.items()
            if not slo.is_met(high)
        ),
        run=run,
        rate_error=rate_error(run.finish_s[run.is_served], workload.concurrency or 1) if offered is None else 0.0,
        is_exact=trial.is_exact,
        offered_per_s=None if trial.keeps_pace else offered,
        pace=trial.pace,
    )


def rate_error(finish_s: FloatArray, in_flight: int) -> float:
    """Relative half-width of the 95 % interval of the rate at which requests leave.

    Student's interval of the mean time that a batch of requests takes to leave. Where a number is kept in flight, those
    of one length leave in waves of that number, so a batch is whole waves: any other has its share of them by chance,
    which makes the interval wider, and is taken only where there are too few waves.

    Args:
        finish_s: when each request left, in any order, [n].
        in_flight: number that is kept in flight; 1 where arrivals do not wait for answers.
    """
    gaps = np.diff(np.sort(finish_s))
    if len(gaps) < FEWEST_BATCHES * in_flight:
        in_flight = 1
    each = max(round(len(gaps) / NUM_BATCHES / in_flight), 1) * in_flight
    num = min(len(gaps) // each, NUM_BATCHES)
    if num < FEWEST_BATCHES or gaps.mean() <= 0.0:
        return 1.0
    means = gaps[: num * each].reshape(num, each).mean(axis=1)
    half = STUDENT_95[num - 2] * float(means.std(ddof=1)) / math.sqrt(num)
    return min(half / float(means.mean()), 1.0)


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
