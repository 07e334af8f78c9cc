"""Deployments in closed form: workers, how many of each, and a bound on the objective.

Rates of :mod:`meshplan.planner.serving.search.workers` are upper bounds, so a score here is the best that the
simulation can confirm.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.serving.estimator.collectives import Exchange
from meshplan.planner.serving.estimator.energy import average_power_w
from meshplan.planner.serving.estimator.memory import kv_bytes_per_token
from meshplan.planner.serving.problem.config import Layout, Pool, Role, ServingConfig
from meshplan.planner.serving.problem.problem import MAX_UTILIZATION, ServingObjective, ServingProblem
from meshplan.planner.serving.search.workers import PricedWorker, pool_of, price_worker

# Prefill and decode workers that are paired: the best of each by requests/s per device.
MAX_PAIRED = 24
# Chunks of prefill are made smaller by this factor, down to the least that keeps products compute-bound.
CHUNK_STEP, LEAST_CHUNK = 4, 512
MILLION = 1e6
INFINITE = float("inf")


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
        usd_per_hour: price of all devices; None without prices.
        power_w: average power of all devices; None without board powers.
        parts: kinds of workers and the number of each.
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


# --- aggregated -----------------------------------------------------------------------------------------------------


def aggregated(problem: ServingProblem, worker: PricedWorker) -> list[Candidate]:
    """Deployments of one kind of mixed worker, by the number of workers that the load asks for."""
    workload, steady = problem.workload, worker.steady
    most = worker.placed.machine.num_devices // worker.num_devices
    pinned = problem.pinned.of(Role.MIXED).get("num_workers")
    candidates = []
    if workload.request_rate_per_s is not None:
        capacity = MAX_UTILIZATION * worker.best_rate_per_s
        needed = math.ceil(workload.request_rate_per_s / capacity) if capacity else most + 1
        for count in _counts(needed, most, pinned):
            each = workload.request_rate_per_s / count
            index = _at_least(np.maximum.accumulate(steady.rate_per_s), each)
            candidates.append(_of_one_kind(problem, worker, count, index, rate=workload.request_rate_per_s))
    elif workload.concurrency is not None:
        for count in _counts(1, min(most, workload.concurrency), pinned):
            running = -(-workload.concurrency // count)
            index = _at_least(steady.num_seqs, running)
            if worker.feasible[index]:
                candidates.append(_of_one_kind(problem, worker, count, index, running=running))
    else:
        allowed = np.where(worker.feasible, steady.rate_per_s, -1.0)
        count = pinned or most  # no device stays idle that another copy could use
        if 1 <= count <= most:
            candidates.append(_of_one_kind(problem, worker, count, int(np.argmax(allowed))))
    return candidates


def _at_least(rising: NDArray[Any], wanted: float) -> int:
    """Position of the first value that is at least ``wanted``; the last where none is."""
    return min(int(np.searchsorted(rising, wanted)), len(rising) - 1)


def rechunked(problem: ServingProblem, candidate: Candidate) -> list[Candidate]:
    """The same mixed deployment with smaller chunks of prefill; empty where they are pinned or already the smallest."""
    worker, count = candidate.parts[0]
    limits = worker.placed.limits
    budget = limits.max_batched_tokens // CHUNK_STEP
    fixed = "max_batched_tokens" in problem.pinned.of(Role.MIXED) or problem.recipe.whole_prompts
    least = max(LEAST_CHUNK, limits.max_num_seqs // worker.placed.layout.attention_data_parallel)
    if worker.placed.role is not Role.MIXED or fixed or budget < least:
        return []
    smaller = price_worker(problem, replace(worker.placed, limits=replace(limits, max_batched_tokens=budget)))
    if not smaller.feasible.any():
        return []
    pinned = replace(problem.pinned, by_role={Role.MIXED: {**problem.pinned.of(Role.MIXED), "num_workers": count}})
    return aggregated(replace(problem, pinned=pinned), smaller)


def _counts(least: int, most: int, pinned: int | None) -> list[int]:
    """Numbers of workers to try: the least that suffices, a few more for headroom, then with doubling steps."""
    if pinned is not None:
        return [pinned] if pinned <= most else []
    tried, step, count = [], 1, least
    while count <= most:
        tried.append(count)
        count += step
        step = step if len(tried) < 4 else 2 * step  # noqa: PLR2004 - a few neighbours, then doubling
    return tried


def _of_one_kind(
    problem: ServingProblem,
    worker: PricedWorker,
    count: int,
    index: int,
    *,
    rate: float | None = None,
    running: int | None = None,
) -> Candidate:
    """``count`` mixed workers in the steady state ``index``, unless the load says what runs."""
    steady = worker.steady
    running = running or int(steady.num_seqs[index])
    # A closed loop is capped at what runs; under open arrivals as much may run as the cache holds.
    cap = None if rate is not None else running
    return _candidate(
        problem,
        ((worker, count),),
        (pool_of(problem, worker.placed, count, cap),),
        rate=count * float(steady.rate_per_s[index]) if rate is None else rate,
        running=running * count,
        tpot_s=float(steady.tpot_s[index]),
        ttft_s=worker.first_token_s,
    )


# --- disaggregated ----------------------------------------------------------------------------------------------------


def disaggregated(problem: ServingProblem, prefill: list[PricedWorker], decode: list[PricedWorker]) -> list[Candidate]:
    """Pairs of prefill and decode workers in the ratios that keep both busy.

    Every pair is tried with the fewest workers that carry the rate (or, where the load is free, with the ratios that
    leave the least capacity unused).
    """
    candidates = []
    for first in _best(prefill):
        for second in _best(decode):
            if first.placed.quantization.kv_cache != second.placed.quantization.kv_cache:
                continue
            candidates += _paired(problem, first, second)
    return candidates


def _best(workers: list[PricedWorker]) -> list[PricedWorker]:
    """The workers with the most requests/s per device."""
    return sorted(workers, key=lambda worker: -worker.best_rate_per_s / worker.num_devices)[:MAX_PAIRED]


def _paired(problem: ServingProblem, prefill: PricedWorker, decode: PricedWorker) -> list[Candidate]:
    supply, demand = prefill.best_rate_per_s * MAX_UTILIZATION, decode.best_rate_per_s
    if not (supply > 0.0 and demand > 0.0):
        return []
    rate = problem.workload.request_rate_per_s
    if rate is not None:
        pairs = {(math.ceil(rate / supply), math.ceil(rate / (MAX_UTILIZATION * demand)))}
        pairs |= {(first + 1, second) for first, second in pairs} | {(first, second + 1) for first, second in pairs}
    else:
        pairs = _ratios(problem, prefill, decode, demand / supply)
    found = []
    for first, second in sorted(pairs):
        parts = ((prefill, first), (decode, second))
        if not (_available(problem, parts) and _joined(problem, parts)):
            continue
        pinned = [problem.pinned.of(role).get("num_workers") for role in (Role.PREFILL, Role.DECODE)]
        if any(want not in (None, have) for want, have in zip(pinned, (first, second), strict=True)):
            continue
        found.append(_pair(problem, prefill, decode, first, second, supply))
    return found


def _ratios(problem: ServingProblem, prefill: PricedWorker, decode: PricedWorker, ratio: float) -> set[tuple[int, int]]:
    """Worker counts near ``ratio`` prefill workers per decode worker."""
    most = max(machine.num_devices for machine in problem.machines.values())
    counts = range(1, max(most // decode.num_devices, 1) + 1)
    pairs = {(max(1, pick(ratio * second)), second) for second in counts for pick in (math.floor, math.ceil)}
    return {
        (first, second) for first, second in pairs if first * prefill.num_devices + second * decode.num_devices <= most
    }


def _available(problem: ServingProblem, parts: tuple[tuple[PricedWorker, int], ...]) -> bool:
    """Whether the node types have that many devices."""
    used: Counter[str] = Counter()
    for worker, count in parts:
        used[worker.placed.node_type] += worker.num_devices * count
    return all(number <= problem.machines[node_type].num_devices for node_type, number in used.items())


def _joined(problem: ServingProblem, parts: tuple[tuple[PricedWorker, int], ...]) -> bool:
    """Whether KV caches have a way from any prefill worker to any decode worker: a network, or one node for all."""
    used: Counter[str] = Counter()
    for worker, count in parts:
        used[worker.placed.node_type] += worker.num_devices * count
    machines = {name: problem.machines[name] for name in used}
    alone = len(used) == 1 and all(used[name] <= machine.domain_size for name, machine in machines.items())
    return alone or all(machine.is_joined for machine in machines.values())


def _pair(
    problem: ServingProblem, prefill: PricedWorker, decode: PricedWorker, first: int, second: int, supply: float
) -> Candidate:
    steady = decode.steady
    rate = min(first * supply, second * decode.best_rate_per_s)
    rate = min(rate, problem.workload.request_rate_per_s or rate)
    index = _at_least(np.maximum.accumulate(steady.rate_per_s), rate / second)
    moved = kv_bytes_per_token(problem.shape, prefill.placed.quantization) * problem.workload.input_length
    transfer = Exchange(machine=prefill.placed.machine).transfer_s(
        moved, devices=min(prefill.num_devices, decode.num_devices)
    )
    running = int(steady.num_seqs[index]) * second
    if problem.has_free_load:  # requests in prefill and in transfer are in flight too
        running += math.ceil(rate * (prefill.first_token_s + transfer))
    return _candidate(
        problem,
        ((prefill, first), (decode, second)),
        (pool_of(problem, prefill.placed, first), pool_of(problem, decode.placed, second)),
        rate=rate,
        running=min(running, problem.workload.concurrency or running),
        tpot_s=float(steady.tpot_s[index]),
        ttft_s=prefill.first_token_s + transfer,
    )


# --- scores -----------------------------------------------------------------------------------------------------------


def _candidate(
    problem: ServingProblem,
    parts: tuple[tuple[PricedWorker, int], ...],
    pools: tuple[Pool, ...],
    *,
    rate: float,
    running: int,
    tpot_s: float,
    ttft_s: float,
) -> Candidate:
    """A deployment with its price, power and bound."""
    config = ServingConfig(engine=problem.rules.name, pools=pools, speculation=problem.speculation)
    usd, power = 0.0, 0.0
    has_price = has_power = True
    for worker, count in parts:
        machine, devices = worker.placed.machine, worker.num_devices * count
        price = machine.usd_per_hour_per_device
        watts = average_power_w(machine.device, worker.prefill_share(rate / count))
        has_price, has_power = has_price and price is not None, has_power and watts is not None
        usd += devices * (price or 0.0)
        power += devices * (watts or 0.0)
    unscored = Candidate(
        config=config,
        score=INFINITE,
        request_rate_per_s=rate,
        num_running=running,
        tpot_s=tpot_s,
        ttft_s=ttft_s,
        usd_per_hour=usd if has_price else None,
        power_w=power if has_power else None,
        parts=parts,
    )
    score = score_of(problem, unscored, request_rate_per_s=rate, tokens_per_s=rate * problem.workload.mean_lengths[1])
    return replace(unscored, score=score)


def score_of(problem: ServingProblem, candidate: Candidate, *, request_rate_per_s: float, tokens_per_s: float) -> float:
    """The objective of a deployment at a rate, as a number to minimise.

    ``throughput_per_device``: seconds of one device per output token; ``usd_per_million_tokens``: USD; ``num_devices``:
    devices; ``max_request_rate``: seconds per request; ``energy``: J per output token. Infinite where a price or a
    board power that it needs is unknown.
    """
    if tokens_per_s <= 0.0:
        return INFINITE
    match problem.objective:
        case ServingObjective.THROUGHPUT_PER_DEVICE:
            return candidate.config.num_devices / tokens_per_s
        case ServingObjective.USD_PER_MILLION_TOKENS:
            usd_per_hour = candidate.usd_per_hour
            return INFINITE if usd_per_hour is None else usd_per_million_tokens(usd_per_hour, tokens_per_s)
        case ServingObjective.NUM_DEVICES:
            return float(candidate.config.num_devices)
        case ServingObjective.MAX_REQUEST_RATE:
            return 1.0 / request_rate_per_s
        case ServingObjective.ENERGY:
            return INFINITE if candidate.power_w is None else candidate.power_w / tokens_per_s


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million output tokens, USD."""
    return usd_per_hour / SECONDS_PER_HOUR / tokens_per_s * MILLION


def config_label(config: ServingConfig) -> str:
    """A deployment in a few words: ``2 × TP4`` or ``3 × TP1 → 2 × TP8 EP8``."""
    return " → ".join(f"{pool.num_workers} × {layout_label(pool.layout)}" for pool in config.pools)


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
