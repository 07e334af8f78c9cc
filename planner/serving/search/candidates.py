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
from meshplan.planner.serving.search.deployment import kv_link
from meshplan.planner.serving.search.families import Counts, Family
from meshplan.planner.serving.search.layouts import PlacedWorker
from meshplan.planner.serving.search.scores import score_at
from meshplan.planner.serving.search.workers import PricedWorker, pool_of, price_worker, smaller_chunk

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
            router=_router(problem) if len(pools) == 1 else Router.LEAST_CONNECTIONS,
        ),
        rate=family.offered_or_most(counts),
        running=running,
        tpot_s=latency,
        ttft_s=max(kind.first_token_s for kind in family.kinds),
    )


def _router(problem: ServingProblem) -> Router:
    """The rule for workers of one kind: by what they hold, where prompts share it block by block and a router knows."""
    trace = problem.workload.trace
    shares_blocks = trace is not None and trace.blocks is not None
    return Router.PREFIX_AWARE if shares_blocks and problem.rules.routes_by_prefix else Router.LEAST_LOADED


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
        router=_router(problem),
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
