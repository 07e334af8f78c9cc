"""Checks an allocation: its traffic, routed as planned, runs through the serving simulator.

Requests of every bucket arrive in one stream (gaps of a Gamma distribution with the workload's burstiness, or the
trace's own), a router sends each to a kind by the plan's weights, and each kind serves its part with the replicas that
carry load (spares stand idle). Interruptible units are absent as often as stated: the pool is simulated in each of its
states, and each request is assigned to one of them (:mod:`meshplan.planner.gpu_allocation.interruptions`).

The attainment of an SLO is the share of a service's requests within its limit; an SLO at the 99th percentile is met
where the lower end of the attainment's 95 % interval is at least 0.99. Violations within one run are correlated (a
burst fills the queue for minutes), so there are :data:`NUM_RUNS` independent runs, and the interval is the wider of
Student's over the means of the runs and Wilson's, which takes all requests to be independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.arrays import BoolArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.constants import STUDENT_95
from meshplan.planner.gpu_allocation.capacity import Offering, pool_of
from meshplan.planner.gpu_allocation.interruptions import PoolState, interruptions_per_s, states_of, states_together
from meshplan.planner.gpu_allocation.nodes.problem import FleetAllocation, FleetProblem
from meshplan.planner.gpu_allocation.question import AllocationQuestion, Service
from meshplan.planner.serving.problem.config import Role, ServingConfig
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.deployment import serve
from meshplan.planner.serving.simulation.arrivals import open_arrivals, scaled
from meshplan.planner.serving.simulation.metrics import QUANTILES, samples_of
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.slo_attainment import attained, wilson_lower

# Independent runs, where the budget lets all be made.
NUM_RUNS = 20
# Runs after which a plan that is far from its SLOs is given up.
NUM_SCREENED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One SLO of one service, and its attainment in the simulation.

    Args:
        service: its index.
        slo: the SLO.
        attained: share of requests within the limit (a mean: the mean latency, s).
        lower: lower end of its 95 % interval (a mean: the upper end of the latency's, s).
        is_kept: the SLO is met at the end of the interval.
    """

    service: int
    slo: Slo
    attained: float
    lower: float
    is_kept: bool

    @property
    def falls_short(self) -> bool:
        """Violated even without the interval: more runs would not help."""
        if self.slo.percentile == "mean":
            return self.attained > self.slo.limit_s
        return self.attained < QUANTILES[self.slo.percentile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Outcome of the simulation of a plan in one scenario.

    Args:
        scenario: its index.
        kept: every SLO.
        num_requests: replayed, all services and runs.
        num_runs: independent runs.
        num_rejected: requests that fit no replica.
        by_kind: kind → share of its requests that meet every SLO; only kinds that were sent some.
        burstiness: coefficient of variation of the gaps between arrivals, largest over the services.
        note: why something was not replayed; empty otherwise.
    """

    scenario: int
    kept: tuple[Kept, ...]
    num_requests: int
    num_runs: int
    num_rejected: int
    by_kind: Mapping[int, float]
    burstiness: float
    note: str = ""

    @property
    def is_kept(self) -> bool:
        """Every SLO is met, and everything was replayed."""
        return not self.note and not self.num_rejected and all(one.is_kept for one in self.kept)


def replay(
    question: AllocationQuestion,
    problem: FleetProblem,
    offerings: Sequence[Offering],
    allocation: FleetAllocation,
    *,
    scenario: int,
    num_requests: int,
    burstiness: float | None = None,
    seeds: Sequence[int],
    budget: Budget | None = None,
) -> Replay:
    """Serve one scenario's traffic with the plan, once for each seed.

    Args:
        question: services and machines.
        problem: what the plan answers.
        offerings: its kinds, with what runs.
        allocation: the plan.
        scenario: whose rates and routing.
        num_requests: requests per service and run.
        burstiness: coefficient of variation of the gaps between arrivals; None for each workload's.
        seeds: one per run, for lengths, arrivals and routing.
        budget: once it is spent no further run is begun; each service has at least one.
    """
    kept: list[Kept] = []
    by_kind: dict[int, float] = {}
    total = rejected = first = runs = 0
    notes: list[str] = []
    for index, service in enumerate(question.services):
        span = slice(first, first + len(service.buckets))
        first = span.stop
        rates = np.array(problem.scenarios[scenario].request_rate_per_s[span])
        if not rates.sum() > 0.0:
            continue
        spread = service.burstiness if burstiness is None else burstiness
        shares = np.array(allocation.routing[scenario])[:, span]
        run = _Runs(problem, offerings, allocation, service, scenario)
        streams = ((seed, sample(service, rates, num_requests, spread, (seed, index))) for seed in seeds)
        try:
            run.serve_each(streams, shares, budget)
        except SpecError as error:
            notes.append(f"{service.name}: {error.problems[0].message}")
            continue
        finally:
            runs = max(runs, run.num_runs)
            total += run.num_requests
        kept += [run.kept(index, slo) for slo in service.slos]
        by_kind |= run.by_kind
        rejected += run.num_rejected
    return Replay(
        scenario=scenario,
        kept=tuple(kept),
        num_requests=total,
        num_runs=runs,
        num_rejected=rejected,
        by_kind=by_kind,
        burstiness=max([burstiness or 1.0] if burstiness else [one.burstiness for one in question.services]),
        note="; ".join(notes),
    )


def sample(
    service: Service, rates: NDArray[np.float64], num: int, burstiness: float, seed: tuple[int, int]
) -> tuple[Requests, IntArray]:
    """``num`` requests of a service at the rates of a scenario, and the bucket of each.

    A trace keeps its own lengths and gaps, is repeated where it is short, and is scaled to the scenario's rate.
    """
    rng = np.random.default_rng(seed)
    rate = float(rates.sum())
    if service.trace is not None:
        return _tiled(service, service.trace, rate, num)
    bucket = rng.choice(len(rates), size=num, p=rates / rate).astype(np.int64)
    lengths = []
    for name in ("input_tokens", "output_tokens"):
        low = np.array([getattr(one.range, name)[0] for one in service.buckets])
        high = np.array([getattr(one.range, name)[1] for one in service.buckets])
        lengths.append(rng.integers(low[bucket], high[bucket] + 1).astype(np.int64))
    arrivals = open_arrivals(rng, num, rate, burstiness=burstiness)
    return Requests(arrival_s=arrivals, input_length=lengths[0], output_length=lengths[1]), bucket


def _tiled(service: Service, trace: Requests, rate: float, num: int) -> tuple[Requests, IntArray]:
    size, times = len(trace), -(-num // len(trace))
    span = float(trace.arrival_s[-1] - trace.arrival_s[0]) * (size / max(size - 1, 1))
    arrival = np.concatenate([trace.arrival_s - trace.arrival_s[0] + k * span for k in range(times)])
    requests = Requests(
        arrival_s=arrival,
        input_length=np.tile(trace.input_length, times),
        output_length=np.tile(trace.output_length, times),
    )
    bucket = np.zeros(size, dtype=np.int64)
    for b, one in enumerate(service.buckets):
        (low_in, high_in), (low_out, high_out) = one.range.input_tokens, one.range.output_tokens
        inside = (trace.input_length >= low_in) & (trace.input_length <= high_in)
        inside &= (trace.output_length >= low_out) & (trace.output_length <= high_out)
        bucket[inside] = b
    return scaled(requests, rate), np.tile(bucket, times)


class _Runs:
    """One service in one scenario, run by run."""

    def __init__(
        self,
        problem: FleetProblem,
        offerings: Sequence[Offering],
        allocation: FleetAllocation,
        service: Service,
        scenario: int,
    ) -> None:
        self.problem, self.offerings = problem, offerings
        self.service = service
        counts = allocation.replicas[problem.stage_of(scenario)]
        self.counts = counts
        self.usable = [max(count - problem.min_spare_replicas, 0) for count in counts]
        self.within: dict[Slo, list[BoolArray]] = {slo: [] for slo in service.slos}
        self.latency: dict[Slo, list[NDArray[np.float64]]] = {slo: [] for slo in service.slos}
        self.of_kind: dict[int, list[BoolArray]] = {}
        self.num_rejected = self.num_runs = self.num_requests = 0

    def serve_each(
        self,
        streams: Iterable[tuple[int, tuple[Requests, IntArray]]],
        shares: NDArray[np.float64],
        budget: Budget | None,
    ) -> None:
        """Serve stream after stream (seed, requests, and their buckets) until the budget is spent, at least one.

        Raises:
            SpecError: the simulator cannot express how the plan pairs prefill and decode kinds.
        """
        for seed, (requests, bucket) in streams:
            self.num_runs += 1
            self.serve(requests, bucket, shares, seed)
            self.num_requests += len(requests)
            if budget is not None and budget.stopped:
                break

    @property
    def by_kind(self) -> dict[int, float]:
        """Kind → share of its requests that meet every SLO."""
        return {g: float(np.concatenate(runs).mean()) for g, runs in self.of_kind.items()}

    def serve(self, requests: Requests, bucket: IntArray, shares: NDArray[np.float64], seed: int) -> None:
        """Route and serve everything.

        Raises:
            SpecError: the simulator cannot express how the plan pairs prefill and decode kinds.
        """
        rng = np.random.default_rng((seed, 1))
        kinds = [offering.kind for offering in self.offerings]
        first = np.array([kind.role is not Role.DECODE for kind in kinds])
        weights = np.where(first[:, None], shares, 0.0)[:, bucket]
        weights = np.cumsum(weights / weights.sum(axis=0), axis=0)
        routed = (rng.random(len(requests)) > weights).sum(axis=0)
        num = len(requests)
        for slo in self.service.slos:
            self.within[slo].append(np.zeros(num, dtype=bool))
            self.latency[slo].append(np.full(num, np.nan))
        for g in np.unique(routed).tolist():
            self._serve_kind(g, requests, np.flatnonzero(routed == g), self._kinds_with(g, shares), rng)

    def _kinds_with(self, g: int, shares: NDArray[np.float64]) -> tuple[int, ...]:
        """The kinds that serve a request sent to kind ``g``: itself, or a prefill and a decode kind."""
        if self.offerings[g].kind.role is Role.MIXED:
            return (g,)
        used = [k for k, row in enumerate(shares) if row.any()]
        prefill, decode = (
            [k for k in used if self.offerings[k].kind.role is role] for role in (Role.PREFILL, Role.DECODE)
        )
        if len(prefill) != 1 or len(decode) != 1:
            message = f"{len(prefill)} prefill and {len(decode)} decode kinds: one of each can be replayed"
            raise SpecError.at("", message)
        return g, decode[0]

    def _states(self, kinds: tuple[int, ...]) -> list[PoolState]:
        """What is left of the kinds' pools, by shares of the time."""
        return states_together(
            [
                states_of(
                    self.problem.offers[self.offerings[k].kind.offer],
                    self.offerings[k].kind,
                    count=self.counts[k],
                    usable=self.usable[k],
                )
                for k in kinds
            ]
        )

    def _serve_kind(
        self, g: int, requests: Requests, chosen: IntArray, kinds: tuple[int, ...], rng: np.random.Generator
    ) -> None:
        part = Requests(
            arrival_s=requests.arrival_s[chosen],
            input_length=requests.input_length[chosen],
            output_length=requests.output_length[chosen],
        )
        states = self._states(kinds)
        # Drawn only where there is a choice: plans without interruptions see the same requests as ever.
        met = np.zeros(len(part), dtype=np.int64)
        if [state.share for state in states] != [1.0]:
            met = np.searchsorted(np.cumsum([state.share for state in states]), rng.random(len(part)), side="right")
        everything = np.zeros(len(part), dtype=bool)
        rate = sum(
            interruptions_per_s(self.problem.offers[k.offer], k) for k in (self.offerings[k].kind for k in kinds)
        )
        for number, state in enumerate(states):
            here = met == number
            if not all(state.usable) or not here.any():
                continue
            run = self._run(part, kinds, state)
            if not number:
                self.num_rejected += run.num_rejected
            if rate:  # what a vanishing replica was serving is lost
                here &= rng.random(len(part)) >= -np.expm1(-rate * (run.finish_s - run.arrival_s))
            everything |= self._noted(run, chosen, here)
        self.of_kind.setdefault(g, []).append(everything)

    def _run(self, part: Requests, kinds: tuple[int, ...], state: PoolState) -> ServingRun:
        problem = self.service.problem
        pools = tuple(
            pool_of(self.offerings[k].replica, self.service, usable)
            for k, usable in zip(kinds, state.usable, strict=True)
        )
        workload = ServingWorkload(
            arrival=Arrival.TRACE,
            input_length=float(part.input_length.mean()),
            output_length=float(part.output_length.mean()),
            prefix_hit_rate=problem.workload.prefix_hit_rate,
            trace=part,
        )
        return serve(problem.site, ServingConfig(engine=problem.rules.name, pools=pools), workload)

    def _noted(self, run: ServingRun, chosen: IntArray, here: BoolArray) -> BoolArray:
        """Record the latencies of the requests in this state; which of them meet every SLO."""
        everything = here.copy()
        for slo in self.service.slos:
            within = attained(run, [slo])
            self.within[slo][-1][chosen[here]] = within[here]
            everything &= within
            metric = "tpot" if slo.metric == "itl" else slo.metric
            counted = run.is_served & (run.output_length > 1) if metric == "tpot" else run.is_served
            seen = np.full(len(run), np.nan)
            seen[counted] = samples_of(run, metric)
            self.latency[slo][-1][chosen[here]] = seen[here]
        return everything

    def kept(self, index: int, slo: Slo) -> Kept:
        """The attainment of an SLO over all runs."""
        if slo.percentile == "mean":
            runs = [run[~np.isnan(run)] for run in self.latency[slo]]
            means = np.array([run.mean() if len(run) else 0.0 for run in runs])
            mean = float(means.mean())
            upper = mean + _half_width(means)
            return Kept(service=index, slo=slo, attained=mean, lower=upper, is_kept=upper <= slo.limit_s)
        within = self.within[slo]
        lower, share = lower_limit(within), float(np.concatenate(within).mean())
        return Kept(
            service=index,
            slo=slo,
            attained=share,
            lower=lower,
            is_kept=lower >= QUANTILES[slo.percentile],
        )


def lower_limit(within: Sequence[BoolArray]) -> float:
    """Lower end of the 95 % interval of a share of requests, from independent runs."""
    everything = np.concatenate(within)
    means = np.array([run.mean() for run in within])
    wilson = wilson_lower(int(np.count_nonzero(everything)), len(everything))
    return min(wilson, max(float(means.mean()) - _half_width(means), 0.0))


def _half_width(means: NDArray[np.float64]) -> float:
    """Half the width of Student's 95 % interval of the mean of independent runs."""
    num = len(means)
    return STUDENT_95[num - 2] * float(means.std(ddof=1)) / math.sqrt(num) if num > 1 else math.inf


def with_headroom(problem: FleetProblem, more: Mapping[int, float]) -> FleetProblem:
    """The problem with other capacity margins: kind → share of its capacity that stays free."""
    kinds = tuple(replace(kind, headroom=more[g]) if g in more else kind for g, kind in enumerate(problem.kinds))
    return replace(problem, kinds=kinds)
