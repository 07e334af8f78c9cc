"""One deployment in closed form: its configuration, price and power, and the loads of its workers.

Rates of :mod:`meshplan.planner.serving.search.workers` are upper bounds, so a score here is the best that the
simulation can confirm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import Layout, Pool, Role, Router, ServingConfig
from meshplan.planner.serving.problem.problem import ServingObjective, ServingProblem
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.deployment import kv_link
from meshplan.planner.serving.search.families import Counts, Family
from meshplan.planner.serving.search.layouts import PlacedWorker
from meshplan.planner.serving.search.scores import score_at
from meshplan.planner.serving.search.slo_judgement import MOST_SIMULATED_WORKERS
from meshplan.planner.serving.search.trials import DECISIVE, FEWEST
from meshplan.planner.serving.search.workers import PricedWorker, pool_of, price_worker, smaller_chunk
from meshplan.planner.serving.simulation.arrivals import default_num_requests
from meshplan.planner.serving.simulation.early_stopping import needed_beyond

# Deployments that are tried because they are expected to carry the load: at most so many.
MOST_CARRIERS = 16
# Weights of the kinds behind one router are whole numbers; the fastest worker has this one.
MOST_WEIGHT = 100
# Relative difference of rates that are one.
SAME_RATE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A deployment that the search may choose.

    Args:
        config: every choice of it.
        score: bound on the objective, smaller is better; see :func:`score_of`.
        request_rate_per_s: rate of the whole deployment, by the closed form.
        num_running: requests in flight over all decode (or mixed) workers.
        tpot_s: by the closed form.
        ttft_s: by the closed form, without queueing.
        usd_per_hour: price of all nodes in use; None without prices.
        power_w: average power of all devices at that rate, by the closed form; None without board powers.
        parts: kinds of workers and the number of each.
        family: its kinds.
        counts: number of each.
    """

    config: ServingConfig
    score: float
    request_rate_per_s: float
    num_running: int
    tpot_s: float
    ttft_s: float
    usd_per_hour: float | None
    power_w: float | None
    parts: tuple[tuple[PricedWorker, int], ...]
    family: Family
    counts: Counts

    @property
    def costs(self) -> list[StepCost]:
        """Iteration tables of the pools as they are configured: a pool may run fewer requests than its workers were
        priced for, which leaves it fewer graphs.
        """
        pools = zip(self.parts, self.config.pools, strict=True)
        return [worker.cost_within(pool.limits.max_num_seqs) for (worker, _), pool in pools]


def candidate_of(family: Family, counts: Counts) -> Candidate:
    """A member of a family as a deployment."""
    return _pair(family, counts) if family.is_disaggregated else _mixed(family, counts)


def _at_least(rising: NDArray[Any], wanted: float) -> int:
    """Position of the first value that is at least ``wanted``; the last where none is."""
    return min(int(np.searchsorted(rising, wanted)), len(rising) - 1)


# --- aggregated -----------------------------------------------------------------------------------------------------


def _mixed(family: Family, counts: Counts) -> Candidate:
    """Mixed workers of one kind or several, each in the steady state that its share of the load asks for."""
    problem, workload = family.problem, family.problem.workload
    rate = workload.request_rate_per_s
    running, latency, pools = 0, 0.0, []
    shares = family.shares(counts, 1.0)
    for kind, count, share, weight in zip(family.kinds, counts, shares, _weights(family), strict=True):
        steady = kind.steady
        if rate is not None:
            at = _at_least(np.maximum.accumulate(steady.rate_per_s), rate * share / count)
        elif workload.concurrency is not None:
            at = _at_least(steady.num_seqs, -(-workload.concurrency // count))
        else:
            rates = np.where(kind.feasible, steady.rate_per_s, -1.0)
            # The most that run at the highest rate: from some on API servers let no more pass.
            at = int(np.flatnonzero(rates >= rates.max() - SAME_RATE * abs(rates.max()))[-1])
        each = -(-workload.concurrency // count) if workload.concurrency is not None else int(steady.num_seqs[at])
        # A closed loop is capped at what runs, but for a pin; under open arrivals as much may run as the cache holds.
        cap = None if rate is not None or "max_num_seqs" in problem.pinned.of(Role.MIXED) else each
        pools.append(replace(pool_of(problem, kind.placed, count, cap), weight=weight))
        running += each * count
        latency += share * float(steady.tpot_s[at])
    return _candidate(
        family,
        counts,
        ServingConfig(
            engine=problem.rules.name,
            pools=tuple(pools),
            speculation=problem.speculation,
            expert_map=_expert_map(problem, pools),
            router=Router.LEAST_LOADED if len(pools) == 1 else Router.LEAST_CONNECTIONS,
        ),
        rate=family.offered_or_most(counts),
        running=running,
        tpot_s=latency,
        ttft_s=max(kind.first_token_s for kind in family.kinds),
    )


def _weights(family: Family) -> list[int]:
    """Weights of the kinds behind one router, by the rate of a worker."""
    if len(family.kinds) == 1:
        return [1]
    fastest = max(family.rates)
    weights = [max(round(MOST_WEIGHT * rate / fastest), 1) for rate in family.rates]
    return [weight // math.gcd(*weights) for weight in weights]


def smaller_batches(candidate: Candidate) -> list[Candidate]:
    """The same mixed deployment with smaller chunks of prefill, or with no more running requests than the SLOs on the
    time between tokens bear in closed form; empty where these are pinned or already so small.
    """
    family, problem = candidate.family, candidate.family.problem
    if family.is_disaggregated:
        return []
    changed: list[tuple[list[PlacedWorker], bool]] = []
    kinds = [kind.placed for kind in family.kinds]
    if any(kind.capped for kind in family.kinds):
        return []
    chunks = [smaller_chunk(problem, placed) for placed in kinds]
    smaller = [new or old for new, old in zip(chunks, kinds, strict=True)]
    if any(chunks):
        changed.append((smaller, False))
    is_given = problem.workload.request_rate_per_s is not None
    if "max_num_seqs" not in problem.pinned.of(Role.MIXED) and is_given:
        caps = [
            replace(kind.placed, limits=replace(kind.placed.limits, max_num_seqs=_most_running(kind)))
            for kind in family.kinds
        ]
        if any(new.limits.max_num_seqs < old.limits.max_num_seqs for new, old in zip(caps, kinds, strict=True)):
            changed.append((caps, True))
    found = []
    for places, capped in changed:
        priced = tuple(
            replace(price_worker(problem, placed), capped=capped)
            for placed, kind in zip(places, family.kinds, strict=True)
        )
        if all(kind.best_rate_per_s > 0.0 for kind in priced):
            found.append(candidate_of(Family(problem=problem, kinds=priced), candidate.counts))
    return found


def _most_running(kind: PricedWorker) -> int:
    """Most requests of a worker at which the closed form meets the SLOs, a multiple of its ranks."""
    ranks = kind.placed.layout.attention_data_parallel
    most = int(kind.steady.num_seqs[np.flatnonzero(kind.feasible)[-1]]) if kind.feasible.any() else ranks
    return max(most // ranks, 1) * ranks


# --- disaggregated ----------------------------------------------------------------------------------------------------


def _pair(family: Family, counts: Counts) -> Candidate:
    problem, (prefill, decode), (first, second) = family.problem, family.kinds, counts
    steady, most = decode.steady, family.rate(counts)
    rate = min(most, problem.workload.request_rate_per_s or most)
    expected = min(rate / second, decode.expected_rate_per_s)
    index = _at_least(np.maximum.accumulate(steady.rate_per_s), expected)
    running = int(steady.num_seqs[index]) * second
    pools = (pool_of(problem, prefill.placed, first), pool_of(problem, decode.placed, second))
    config = ServingConfig(
        engine=problem.rules.name,
        pools=pools,
        speculation=problem.speculation,
        expert_map=_expert_map(problem, pools),
        kv_connector=problem.kv_connector,
    )
    transfer = kv_link(problem.site, config).transfer_s(problem.workload.input_length)
    if problem.has_free_load:  # requests in prefill and in transfer are in flight too
        running += math.ceil(rate * (prefill.first_token_s + transfer))
    return _candidate(
        family,
        counts,
        config,
        rate=rate,
        running=min(running, problem.workload.concurrency or running),
        tpot_s=float(steady.tpot_s[index]),
        ttft_s=prefill.first_token_s + transfer,
    )


def _expert_map(problem: ServingProblem, pools: Sequence[Pool]) -> tuple[tuple[int, ...], ...] | None:
    """The places of the experts that the question gives, where a pool spreads them over devices."""
    experts = problem.experts
    if experts is None or experts.placement is None or all(pool.layout.expert_parallel == 1 for pool in pools):
        return None
    return tuple(tuple(layer) for layer in experts.placement.tolist())


# --- refused without a simulation -------------------------------------------------------------------------------------


def refused(problem: ServingProblem, candidate: Candidate) -> str | None:
    """Why a deployment is not simulated: a limit on money or power that it exceeds, or a wait that is certain."""
    limits = problem.limits
    if limits.max_usd_per_hour is not None and (candidate.usd_per_hour or 0.0) > limits.max_usd_per_hour:
        return "cost per hour is above max_usd_per_hour"
    if limits.max_power_w is not None and (candidate.power_w or 0.0) > limits.max_power_w:
        return "average power is above max_power_w"
    late = overload(candidate)
    return None if late is None else f"{late.key} cannot hold with so many requests in flight (least wait)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A closed loop so far beyond capacity that an SLO is violated whatever is simulated.

    Args:
        key: of the SLO, or of two that cannot hold together.
        text: what takes how long at least, in words.
        limit_s: what the SLO allows.
        least_s: what it is certain to be at least.
    """

    key: str
    text: str
    limit_s: float
    least_s: float


def overload(candidate: Candidate) -> Overload | None:
    """The SLO of a closed loop that is certain to be violated :data:`DECISIVE`-fold, by the most; None where none is.

    C requests are in flight until the run of N ends. Two bounds, whatever the scheduler mixes into an iteration:

    *The first C* come at once. Workers whose least times for a prompt are p_i finish at most Σ (t/p_i + 1) prompts in
    a time t, so that C − Σ (t/p_i + 1) of the N times to first tokens are longer than t, in any order and with any
    router.

    *Those that follow* are begun in the order in which they came, at most R at once (``max_num_seqs``). Each finds c =
    C − 1 before it, but for one a worker that an even share leaves over, of which c − R have to end before it is begun,
    and no more than R of these may be half done: with X requests/s at most it waits (c − 2R)/X. Of workers that do
    both this is time before the first token. Behind prefill workers it may lie between tokens as well: where the stay
    is longer than TTFT and TPOT allow together, one of both is too long for every one of the N − C, and no two
    percentiles leave so many out. Of identical workers, whose router loads them evenly, and where no client thinks.
    """
    problem = candidate.family.problem
    workload = problem.workload
    if workload.arrival is not Arrival.CLOSED_LOOP or workload.concurrency is None:
        return None
    # Of many workers four are simulated, with their share of the load.
    parts = max(candidate.config.num_workers / MOST_SIMULATED_WORKERS, 1.0)
    num = parts * max(default_num_requests(workload) / (1.0 if workload.num_requests else parts), FEWEST)
    in_flight = min(workload.concurrency, num)
    following_s, following = _least_following_s(candidate), num - in_flight
    waits_first = not candidate.config.is_disaggregated
    found = []
    for slo in problem.slos:
        least_s = _least_of_first_s(candidate, slo, in_flight, num) if slo.metric in ("ttft", "e2e") else 0.0
        if slo.metric == "e2e" or (slo.metric == "ttft" and waits_first):
            if slo.percentile == "mean":
                least_s = max(least_s, following_s * following / num)
                if slo.metric == "e2e":  # Little's law alone: all C stay until the last one is sent
                    least_s = max(least_s, in_flight / _most_per_s(candidate) * following / num)
            elif following >= needed_beyond(slo.percentile, math.ceil(num)):
                least_s = max(least_s, following_s)
        text = f"the {slo.percentile} of {slo.metric.upper()} is"
        found.append(Overload(key=slo.key, text=text, limit_s=slo.limit_s, least_s=least_s))
    for first, each in itertools.product(problem.slos, problem.slos):
        if (first.metric, each.metric) != ("ttft", "tpot") or "mean" in (first.percentile, each.percentile):
            continue
        if following > sum(needed_beyond(slo.percentile, math.ceil(num)) for slo in (first, each)):
            limit_s = first.limit_s + max(workload.output_length - 1.0, 0.0) * each.limit_s
            text = "a whole stay, of which both limit their part, is"
            key = f"{first.key} with {each.key}"
            found.append(Overload(key=key, text=text, limit_s=limit_s, least_s=following_s))
    certain = [one for one in found if one.least_s > DECISIVE * one.limit_s]
    return max(certain, key=lambda one: one.least_s / one.limit_s, default=None)


def _least_of_first_s(candidate: Candidate, slo: Slo, in_flight: float, num: float) -> float:
    """The first bound of :func:`overload`: t at which as many are longer as the percentile needs, s.

    For a mean the most of t times the share of those that are longer, which is where half of them are.
    """
    kinds = [(kind, count) for kind, count in candidate.parts if kind.placed.role is not Role.DECODE]
    most_per_s = sum(count / kind.least_prompt_s for kind, count in kinds)
    waiting = in_flight - sum(count for _, count in kinds)
    if slo.percentile == "mean":
        return max(waiting, 0.0) ** 2 / (4.0 * most_per_s * num)
    return (waiting - needed_beyond(slo.percentile, math.ceil(num))) / most_per_s


def _least_following_s(candidate: Candidate) -> float:
    """The second bound of :func:`overload`, s; 0 where it does not hold."""
    workload, parts = candidate.family.problem.workload, candidate.parts
    several = len(parts) > 1 and not candidate.config.is_disaggregated
    if several or workload.think_s or workload.num_prefixes is not None:
        return 0.0
    begun = sum(pool.num_workers * (1.0 + 2.0 * pool.limits.max_num_seqs) for pool in candidate.config.pools)
    return max((workload.concurrency or 0) - begun, 0.0) / _most_per_s(candidate)


def _most_per_s(candidate: Candidate) -> float:
    """X: no more requests/s are finished, whatever the SLOs."""
    each = [count * float(kind.most_rate_per_s.max()) for kind, count in candidate.parts]
    return min(each) if candidate.config.is_disaggregated else sum(each)


# --- scores -----------------------------------------------------------------------------------------------------------


def _candidate(
    family: Family, counts: Counts, config: ServingConfig, *, rate: float, running: int, tpot_s: float, ttft_s: float
) -> Candidate:
    """A deployment with its price, power and bound."""
    unscored = Candidate(
        config=config,
        score=family.score(counts),
        request_rate_per_s=rate,
        num_running=running,
        tpot_s=tpot_s,
        ttft_s=ttft_s,
        usd_per_hour=family.usd_per_hour(counts),
        power_w=family.power_w(counts, family.shares(counts, rate)),
        parts=tuple(zip(family.kinds, counts, strict=True)),
        family=family,
        counts=counts,
    )
    tokens_per_s = rate * family.problem.workload.mean_lengths[1]
    score = score_of(family.problem, unscored, request_rate_per_s=rate, tokens_per_s=tokens_per_s)
    return replace(unscored, score=score)


def power_at(candidate: Candidate, request_rate_per_s: float) -> float | None:
    """Average power of all devices at a rate, W; None without board powers."""
    family, counts = candidate.family, candidate.counts
    return family.power_w(counts, family.shares(counts, request_rate_per_s))


def score_of(problem: ServingProblem, candidate: Candidate, *, request_rate_per_s: float, tokens_per_s: float) -> float:
    """The objective of a deployment at a rate; see :func:`~meshplan.planner.serving.search.scores.score_at`."""
    needs_power = problem.objective is ServingObjective.ENERGY
    return score_at(
        problem.objective,
        num_devices=candidate.family.counted_devices(candidate.counts),
        usd_per_hour=candidate.usd_per_hour,
        power_w=power_at(candidate, request_rate_per_s) if needs_power else None,
        request_rate_per_s=request_rate_per_s,
        tokens_per_s=tokens_per_s,
    )


def config_label(config: ServingConfig) -> str:
    """A deployment in a few words: ``2 × TP4``, ``3 × TP1 → 2 × TP8 EP8``, ``4 × TP4 on A + 2 × TP8 on B``."""
    if config.is_disaggregated:
        return " → ".join(f"{pool.num_workers} × {layout_label(pool.layout)}{_more(pool)}" for pool in config.pools)
    several = len(config.pools) > 1
    return " + ".join(
        f"{pool.num_workers} × {layout_label(pool.layout)}{_more(pool)}" + (f" on {pool.node_type}" if several else "")
        for pool in config.pools
    )


def _more(pool: Pool) -> str:
    """A power limit, instances of devices, FFN devices, and weights beyond device memory."""
    cap = "" if pool.power_cap_w is None else f" at {pool.power_cap_w:g} W"
    cap += "" if pool.share is None else f" in {pool.share.name}"
    cap += "" if pool.ffn is None else f", {pool.ffn.label}"
    return cap if pool.weight_tiers is None else f"{cap}, {pool.weight_tiers.label}"


def layout_label(layout: Layout) -> str:
    """Degrees above 1.

    >>> layout_label(Layout(tensor_parallel=4, pipeline_parallel=2))
    'TP4 PP2'
    """
    degrees = (
        ("TP", layout.tensor_parallel),
        ("PP", layout.pipeline_parallel),
        ("DP", layout.attention_data_parallel),
        ("CP", layout.context_parallel),
        ("EP", layout.expert_parallel),
    )
    return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1 or name == "TP")


# --- which are likely to meet the SLOs -------------------------------------------------------------------------------


def soonest(
    families: Iterable[Family], number: int, is_legal: Callable[[Family, Counts], bool]
) -> list[tuple[Family, Counts]]:
    """Families on all devices: the ``number`` whose workers begin soonest and the ``number`` whose workers generate
    fastest, with one request running; of workers that do both, and of pairs that prefill and decode.
    """
    every = list(families)
    found: dict[int, tuple[Family, Counts]] = {}
    for is_pair in (False, True):
        group = [family for family in every if family.is_disaggregated is is_pair]
        first = sorted(group, key=lambda family: family.kinds[0].first_token_s)
        between = sorted(group, key=lambda family: float(family.kinds[-1].steady.tpot_s[0]))
        for best in (first, between):
            fitting = ((family, counts) for family in best if is_legal(family, counts := full_counts(family)))
            found |= {id(one[0]): one for one in itertools.islice(fitting, number)}
    return list(found.values())


def carriers(families: Iterable[Family], is_legal: Callable[[Family, Counts], bool]) -> list[tuple[Family, Counts]]:
    """Families on all devices that are expected to carry the given rate within the SLOs: those with most to spare."""
    whole = [(family, full_counts(family)) for family in families]
    able = [one for one in whole if expected_rate(*one) >= (one[0].problem.workload.request_rate_per_s or math.inf)]
    able.sort(key=lambda one: -expected_rate(*one))
    return list(itertools.islice((one for one in able if is_legal(*one)), MOST_CARRIERS))


def full_counts(family: Family, *, most: int | None = None) -> Counts:
    """As many workers as the devices hold, at most ``most`` of a kind; of several kinds the same share of each."""
    counts = tuple(family.pinned(which) or family.most(which) for which in range(len(family.kinds)))
    if most is not None:
        counts = tuple(min(count, most) for count in counts)
    while len(counts) > 1 and min(counts) > 1 and not family.fits(counts):
        counts = tuple(max(count // 2, 1) for count in counts)
    return counts


def expected_rate(family: Family, counts: Counts) -> float:
    """Requests/s that a member is expected to carry within the SLOs: an estimate, no bound as :meth:`Family.rate`."""
    each = [count * kind.expected_rate_per_s for count, kind in zip(counts, family.kinds, strict=True)]
    return min(each) if family.is_disaggregated else sum(each)
