"""One load, simulated until the confidence decides whether every SLO holds (a sequential test).

*What holds.* An SLO is kept where a longer run of other requests, of :data:`LONGER_RUN`, keeps it with 99 % confidence.
Near saturation that is more than a percentile within its limit: the 99th of 20,000 requests varies by a tenth.

*How long.* The first run has :data:`FEWEST` requests. Near saturation waits rise and fall over thousands of requests,
of which a short run sees one part: unless it is met clearly, an SLO is met by a run of :data:`MOST` only. A run that
meets it has :data:`STAYS` times the requests that are in the system together (arrival rate × mean end-to-end latency,
Little's law; at least half of that once they are counted in that run), :data:`RELAXATION`/(1 − utilization)² and ten
times the shared prefixes: its first tenth, the warm-up, then fills batches and caches and is not measured. Near
saturation, where a queue forgets its start over more requests than a first run has, and where that run leaves open what
a longer one would show, it has as many requests as show several clusters of slow ones in each of its parts
(:func:`~meshplan.planner.serving.simulation.slo_attainment.requests_to_see`): the more, the longer the load's queues
last and the rarer the percentile. A longer run begins with the requests of the shorter one, and all deployments and
rates see the same requests (common random numbers).

*When it is decided.* An SLO is violated once the lower end of its latency's 99 % interval is above the limit, or an
unfinished run is certain to exceed :data:`DECISIVE` times the limit: a system that starts empty is at its best. It is
met by a first run whose upper end is within :data:`CLEARLY` of the limit, or by a run that is long enough once the
upper end of what another, longer run would show
(:func:`~meshplan.planner.serving.simulation.slo_attainment.longer_run_interval`) is within the limit. A search looks at
many deployments and rates by the first interval alone and holds only what it would answer against longer runs
(:class:`Effort`). A longer run is made unless its narrower interval (as 1/√requests) would not show that the SLOs are
met either. What is still open counts as not met; so does a load so near the capacity that no run of :data:`LONGEST`
requests forgets its start. Where the question gives the number of requests, it is one run of that many, and the SLOs
are held against its percentiles as they are.

*A queue that grows.* Requests that arrive by themselves have to be finished as fast as they come. Where an SLO limits a
wait (TTFT or E2E), only a run that meets it and yet shows a growing queue
(:func:`~meshplan.planner.serving.simulation.slo_attainment.pace`) is turned into one that does not: the limit is so
wide that its run ends before the waits reach it. Where none does, nothing else tells, and that the queue does not grow
has to be shown as an SLO has: runs grow by :data:`GROWTH` from :data:`MOST` up to :data:`LONGEST` requests until it is,
or until it is shown to grow; what stays open does not keep pace. A given number of requests is one run here too, in
which the queue must not be shown to grow. A trace is replayed as it is and ends: its SLOs alone tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping, SloViolatedError
from meshplan.planner.serving.simulation.metrics import DECISION_T, itl, latency, samples_of
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.slo_attainment import (
    Pace,
    latency_interval,
    longer_run_interval,
    pace,
    requests_to_see,
)

Serve = Callable[[Requests, EarlyStopping | None], ServingRun]

# Requests of the first run, and of one that decides: about a quarter of a second. Llama-70B on 8 H100 just below
# saturation: the interval of 1,024 requests misses the p99 wait of 20,000 in every third draw, by up to a third; that
# of 8,192 in none of twelve (three rates, four seeds).
FEWEST, MOST = 1024, 8192
# Share of its limit within which a latency is met clearly: waits of a short run are too low by up to a third, times per
# token by a few per cent.
CLEARLY = {"ttft": 0.5, "e2e": 0.5, "tpot": 0.8, "itl": 0.8}
# Requests of the longer run that keeps the SLOs: twenty times those of the first.
LONGER_RUN = 20 * FEWEST
# Requests of a run over those in the system together, and the most of any run: beyond, a deployment of that many busy
# workers is measured over fewer stays.
STAYS, LONGEST = 12, 65_536
# Mean stays over which a run has to last before it says whether a queue grows: batches fill in the first one or two.
FILLING = 3
# Requests of a run times the square of the share of the capacity that is left free. A queue forgets its start over
# about 4/(1 − ρ)² arrivals (relaxation time of the M/M/1 queue, 1/(μ(1 − √ρ)²), for ρ near 1); five times that is 8,000
# requests at ρ = 0.95.
RELAXATION = 20.0
# A run that settles what the one before left open is so many times as long: most rates that fail do so soon.
GROWTH = 3
# Share of the requests that comes before the measured ones, and its inverse.
WARM_UP = 0.1
# Multiple of a limit beyond which an unfinished run is given up.
DECISIVE = 2.0


class Verdict(Enum):
    """Whether every SLO holds."""

    MET = "met"
    VIOLATED = "violated"
    OPEN = "open"  # not decided with the stated confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A load that was simulated.

    Args:
        verdict: see :class:`Verdict`.
        run: the measured part; None where it was stopped.
        interval_s: SLO → 99 % interval of its latency, s; twice the latency itself where the number of requests was
            given.
        num_requests: simulated, the warm-up included.
        is_exact: that number was given.
        pace: what the run says of the queue; None where requests do not arrive by themselves, or too few tell.
        keeps_pace: the queue does not grow; where no SLO limits a wait, that is shown.
    """

    verdict: Verdict
    run: ServingRun | None
    interval_s: Mapping[Slo, tuple[float, float]]
    num_requests: int
    is_exact: bool = False
    pace: Pace | None = None
    keeps_pace: bool = True

    @property
    def ratio(self) -> float:
        """The largest latency/limit at the upper ends of the intervals; :data:`DECISIVE` where the run was stopped."""
        if self.run is None:
            return DECISIVE
        return max((high / slo.limit_s for slo, (_, high) in self.interval_s.items()), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that can be had in any number.

    Args:
        requests: number → the first so many.
        given: the number that the question asks for; None: as many as the confidence needs.
        num_prefixes: distinct shared prefixes.
        utilization: rate over the highest that the closed form allows.
        goes_on: requests arrive by themselves at one mean rate, whatever is finished.
    """

    requests: Callable[[int], Requests]
    given: int | None = None
    num_prefixes: int = 0
    utilization: float = 0.0
    goes_on: bool = False

    @property
    def relaxing(self) -> float:
        """Requests of a run in which a queue forgets its start several times; ∞ for one that only grows."""
        free = 1.0 - self.utilization
        return RELAXATION / free**2 if free > 0.0 else math.inf


class Effort(Enum):
    """How much a load is worth."""

    FIRST = "first run"  # what it leaves open stays open
    CLEAR = "clear"  # the same, by a run that is long enough for its stays where a first run is clear but too short
    SEARCH = "search"  # whether it is worth a closer look: by the interval of its own latencies
    DECIDE = "decide"  # whether longer runs keep the SLOs: what SEARCH meets, by as many requests as show that
    SETTLE = "settle"  # the same near the highest rate, where queues last and only many requests tell


def tried(
    load: Load,
    serve: Serve,
    slos: Sequence[Slo],
    *,
    may_stop_early: bool,
    effort: Effort = Effort.DECIDE,
    check: Callable[[], None] | None = None,
) -> Trial:
    """Simulate a load until it is decided; see the module's text.

    Args:
        load: the requests.
        serve: simulates them.
        slos: what must be met. A rejected request violates all.
        may_stop_early: a run that is certain to violate an SLO by far need not end.
        effort: see :class:`Effort`.
        check: raises where the time is over, at the looks of runs that may stop early.
    """
    stopping = EarlyStopping(slos=slos, margin=DECISIVE, check=check) if may_stop_early and slos else None
    num = load.given or (MOST if effort is Effort.SETTLE else FEWEST)
    while True:
        try:
            whole = serve(load.requests(num), stopping)
        except SloViolatedError:
            return Trial(verdict=Verdict.VIOLATED, run=None, interval_s={}, num_requests=num)
        run = whole.after(min(math.ceil(WARM_UP * num), num - 1))  # a single request is all there is
        queue = _Queue.of(load, run, slos)
        if load.given is not None:  # one run, as asked
            return _as_given(whole, queue, slos)
        look = _Look.at(run, num, load, slos, effort, queue)
        if look.is_over:
            return queue.tell(look.trial)
        num = look.next_num


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What a run says of its load, and how many requests the next one needs.

    Args:
        run: the measured part.
        num: its requests, the warm-up included.
        load: what was simulated.
        effort: what is asked of it.
        queue: what it says of the queue.
        interval_s: SLO → 99 % interval by which it is decided, s.
        said: the verdict of these intervals and of the queue.
        are_clear: every SLO is met clearly.
        enough: requests of a run that is long enough to meet the SLOs.
        telling: those of a run from which a longer one can be told; 0 where that is not asked.
    """

    run: ServingRun
    num: int
    load: Load
    effort: Effort
    queue: _Queue
    interval_s: Mapping[Slo, tuple[float, float]]
    said: Verdict
    are_clear: bool
    enough: int
    telling: int

    @classmethod
    def at(cls, run: ServingRun, num: int, load: Load, slos: Sequence[Slo], effort: Effort, queue: _Queue) -> _Look:
        """What the measured part of a run of ``num`` requests says."""
        own = found = {slo: latency_interval(run, slo, DECISION_T) for slo in slos}
        if effort in (Effort.DECIDE, Effort.SETTLE) and num > FEWEST:
            found = {slo: (low, longer_run_interval(run, slo, LONGER_RUN)[1]) for slo, (low, _) in own.items()}
        said = queue.holding(_verdict(found))
        are_clear = all(high <= CLEARLY[slo.metric] * slo.limit_s for slo, (_, high) in found.items())
        enough = max(_long_enough(run, load.num_prefixes), math.ceil(min(load.relaxing, LONGEST)))
        telling = 0
        if not (are_clear and queue.is_clear):
            enough = max(enough, MOST)
            is_near = said is Verdict.OPEN or load.relaxing > FEWEST
            is_met = effort is Effort.DECIDE and num > FEWEST and _verdict(own) is Verdict.MET
            if effort is Effort.SETTLE or (is_met and is_near):
                telling = _telling(run, slos)
            if not queue.is_clear and effort is not Effort.SEARCH:
                enough = max(enough, min(GROWTH * num, LONGEST))
        return cls(
            run=run,
            num=num,
            load=load,
            effort=effort,
            queue=queue,
            interval_s=found,
            said=said,
            are_clear=are_clear,
            enough=enough,
            telling=telling,
        )

    @property
    def is_long(self) -> bool:
        """The run is as long as a run that meets the SLOs has to be."""
        return (self.num >= self.enough or FEWEST < self.num >= self.enough / 2) and self.num >= self.telling

    @property
    def is_endless(self) -> bool:
        """Whatever this run shows, the queue of a longer one may be longer."""
        return self.load.relaxing > LONGEST and not self.queue.is_untold

    @property
    def is_last(self) -> bool:
        """No longer run is asked for: what this one leaves open stays open."""
        is_clear = self.are_clear and self.queue.is_clear
        return self.effort is Effort.FIRST or (self.effort is Effort.CLEAR and not is_clear)

    @property
    def verdict(self) -> Verdict:
        """What is decided: a run that is too short, or whose load no run settles, meets nothing."""
        settles = not self.is_endless and (not self.is_last or (self.is_long and self.are_clear))
        return Verdict.OPEN if self.said is Verdict.MET and not settles else self.said

    @property
    def is_over(self) -> bool:
        """Decided, or a longer run would not show more."""
        if self.verdict is Verdict.VIOLATED or self.is_long or self.is_endless or self.is_last:
            return True
        seen = latencies(self.run, tuple(self.interval_s))
        return _is_futile(self.num, max(self.enough, self.telling), self.interval_s, seen)

    @property
    def trial(self) -> Trial:
        """The outcome, where this run is the last."""
        found = self.interval_s
        if self.said is Verdict.MET and self.is_endless:
            found = {slo: (low, math.inf) for slo, (low, _) in found.items()}
        return Trial(verdict=self.verdict, run=self.run, interval_s=found, num_requests=self.num)

    @property
    def next_num(self) -> int:
        """Requests of the next run."""
        grown = GROWTH * self.num
        longer = max(self.enough, self.telling if self.verdict is Verdict.MET else min(self.telling, grown))
        return longer if self.queue.is_clear else min(longer, max(MOST, grown))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queue:
    """What a run says of the queue, and what has to be shown of it.

    Args:
        pace: None where requests do not arrive by themselves, or too few tell, or batches still fill.
        alone: no SLO limits a wait, so that nothing else shows whether the queue grows.
        is_endless: the load is so near the capacity that no run forgets its start.
    """

    pace: Pace | None
    alone: bool
    is_endless: bool

    @classmethod
    def of(cls, load: Load, run: ServingRun, slos: Sequence[Slo]) -> _Queue:
        """The queue of the measured part of a run."""
        return cls(
            pace=pace(run) if load.goes_on and (load.given is not None or _has_filled(run)) else None,
            alone=load.goes_on and not any(slo.metric in ("ttft", "e2e") for slo in slos),
            is_endless=load.relaxing > LONGEST,
        )

    @property
    def is_clear(self) -> bool:
        """Nothing is left to show of it."""
        return not self.alone or (self.pace is not None and self.pace.is_kept)

    @property
    def is_lost(self) -> bool:
        """It is shown to grow."""
        return self.pace is not None and self.pace.is_lost

    @property
    def is_untold(self) -> bool:
        """Nothing is known of it yet."""
        return self.alone and self.pace is None

    def holding(self, verdict: Verdict) -> Verdict:
        """The verdict on the SLOs and on the queue together: what meets the SLOs must not have one that grows."""
        if verdict is Verdict.MET and self.is_lost:
            return Verdict.VIOLATED
        return verdict if self.is_clear or verdict is Verdict.VIOLATED else Verdict.OPEN

    def tell(self, trial: Trial) -> Trial:
        """The trial with what is said of its queue."""
        kept = self.is_clear and not self.is_endless if self.alone else not self.is_lost
        return replace(trial, pace=self.pace, keeps_pace=kept)


def _as_given(whole: ServingRun, queue: _Queue, slos: Sequence[Slo]) -> Trial:
    """The trial of a run whose number of requests was given: its latencies are what it says."""
    exact = {slo: (value, value) for slo, value in latencies(whole, slos).items()}
    keeps_pace = not (queue.alone and queue.is_lost)
    return Trial(
        verdict=_verdict(exact) if keeps_pace else Verdict.VIOLATED,
        run=whole,
        interval_s=exact,
        num_requests=len(whole),
        is_exact=True,
        pace=queue.pace,
        keeps_pace=keeps_pace,
    )


def _telling(run: ServingRun, slos: Sequence[Slo]) -> int:
    """Requests of a run from which a longer one can be told, the warm-up included."""
    return min(math.ceil(max((requests_to_see(run, slo) for slo in slos), default=0) / (1.0 - WARM_UP)), LONGEST)


def _is_futile(
    num: int, longer: int, interval_s: Mapping[Slo, tuple[float, float]], latency_s: Mapping[Slo, float]
) -> bool:
    """Even a longer run would not show that every SLO holds, as far as ``num`` requests tell."""
    narrower = math.sqrt(num / longer)
    return any(
        latency_s[slo] + narrower * (high - latency_s[slo]) > slo.limit_s for slo, (_, high) in interval_s.items()
    )


def latencies(run: ServingRun, slos: Sequence[Slo]) -> dict[Slo, float]:
    """The latency that each SLO limits, s; ∞ if a request was rejected, 0 where it is undefined."""
    if run.num_rejected:
        return dict.fromkeys(slos, math.inf)
    seen = {
        metric: itl(run.workers) if metric == "itl" else latency(samples_of(run, metric))
        for metric in {slo.metric for slo in slos}
    }
    return {slo: seen[slo.metric].value(slo.percentile) for slo in slos}


def _verdict(interval_s: Mapping[Slo, tuple[float, float]]) -> Verdict:
    if any(low > slo.limit_s for slo, (low, _) in interval_s.items()):
        return Verdict.VIOLATED
    return Verdict.MET if all(slo.is_met(high) for slo, (_, high) in interval_s.items()) else Verdict.OPEN


def _has_filled(run: ServingRun) -> bool:
    """The run is so long that growing waits are no sign of batches that fill: some stays, or many requests."""
    arrival, served = run.arrival_s, run.is_served
    if len(run) >= (1.0 - WARM_UP) * MOST or not served.any():
        return True
    return float(arrival[-1] - arrival[0]) >= FILLING * float((run.finish_s - arrival)[served].mean())


def _long_enough(run: ServingRun, num_prefixes: int) -> int:
    """Requests of a run in which the warm-up fills batches and caches and the rest sees many stays."""
    arrival = run.arrival_s
    span = float(arrival[-1] - arrival[0]) if len(arrival) > 1 else 0.0
    if span <= 0.0 or run.num_rejected:
        return FEWEST
    together = float((run.finish_s - arrival).mean()) * (len(run) - 1) / span
    return min(max(math.ceil(STAYS * together), math.ceil(num_prefixes / WARM_UP), FEWEST), LONGEST)
