"""A second tier of prefix cache in the store and the size that a plan finds (``kv_tier.choose``).

*Size.* A cache that evicts the least recently used holds what was written in its last D requests. Of m prefixes, asked
for at random, one is among them with probability f = 1 − (1 − 1/m)^D ≈ 1 − e^(−D/m), so that finding it in f of all
cases takes (Che et al., IEEE JSAC 20, 2002)::

    tokens(f) = f·m·prefix + D·own,      D = −m·ln(1 − f)

with ``own`` what a request writes beyond its prefix. The plan takes f = 0.99, so that most percentiles of an SLO are of
requests that found theirs, or all that the store has. Recorded prompts and conversations say themselves what was
written between two uses: the size is then the least that finds f of what a cache without limit finds
(:mod:`.prefix_reuse`).

*Rate.* Fetching a token's cache takes as long as computing it at bytes of the token × prefill tokens/s: stores that are
slower are not searched.

*Choice.* The plan is the best of the searches without a tier and with each store. Sizes follow the formula, not a
proof, so that such a plan is feasible, never optimal. Memory and drives are part of the nodes: their rent is what they
cost. Rates and NVMe's size are those of :mod:`meshplan.planner.serving.search.cache_shapes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Solution, Status, relative_gap
from meshplan.planner.serving.estimator.pools import pool_memory, pool_worker
from meshplan.planner.serving.estimator.steady_state import prefill_s
from meshplan.planner.serving.problem.config import KvTier, Pool
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Requests, ServingWorkload
from meshplan.planner.serving.search.branch import TIE, Simulated
from meshplan.planner.serving.search.cache_shapes import largest_tier
from meshplan.planner.serving.search.search import ServingReport, search_serving
from meshplan.planner.serving.tiers.host import link_bytes_per_s
from meshplan.planner.serving.tiers.prefix_reuse import break_even_bytes_per_s, prefix_blocks, prefix_reuse

# Share of requests whose prefix a tier is made to find.
FOUND = 0.99
# A deployment whose tier may be so much smaller or larger than the searched one is searched again with its own.
_SAME_SIZE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedTier:
    """A store as a deployment would use it.

    Args:
        tier: its size and rate.
        needed_bytes_per_device: what :data:`FOUND` takes, whether or not the store has it.
        break_even_bytes_per_s: of one device; below it the tier would cost more time than it spares.
    """

    tier: KvTier
    needed_bytes_per_device: float
    break_even_bytes_per_s: float

    @property
    def pays(self) -> bool:
        """Fetching is faster than computing again."""
        return self.tier.bytes_per_s_per_device > self.break_even_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The best of the searches.

    Args:
        problem: the question with the tier that the plan has.
        solution: with the bound of all searches.
        report: of the best search.
        stores: what was found of each store, as plain JSON.
    """

    problem: ServingProblem
    solution: Solution[Simulated]
    report: ServingReport
    stores: list[dict[str, Any]]


def tokens_for(workload: ServingWorkload, found: float) -> float:
    """Tokens of a tier in which a share of requests finds its prefix; see the module's text.

    >>> from meshplan.planner.serving.problem.requests import Arrival
    >>> load = {"input_length": 1000.0, "output_length": 100.0, "prefix_hit_rate": 0.9, "num_prefixes": 10}
    >>> round(tokens_for(ServingWorkload(arrival=Arrival.POISSON, **load), 0.5))
    5886
    """
    if workload.trace is not None:
        return _recorded_tokens(workload.trace, found)
    prefixes = workload.num_prefixes or 0
    prompt, output = workload.mean_lengths
    shared = prompt * workload.prefix_hit_rate
    requests = -prefixes * math.log1p(-found)
    return found * prefixes * shared + requests * (prompt - shared + output)


# Every store and every size of a question is held against the same requests.
@lru_cache(maxsize=4)
def _recorded_tokens(trace: Requests, found: float) -> float:
    """Tokens of a cache that finds a share of what one without limit finds of some requests."""
    blocks = trace.blocks or prefix_blocks(trace)
    whole = trace.input_length + trace.output_length
    chains, named, unnamed = [], int(blocks.names.max(initial=0)) + 1, 0
    for chain, tokens in zip(blocks.chains(), whole.tolist(), strict=True):
        rest = max(-(-tokens // blocks.tokens_each) - len(chain), 0)
        chains.append([*chain, *range(named + unnamed, named + unnamed + rest)])
        unnamed += rest
    return prefix_reuse(chains).size_for(found) * blocks.tokens_each


def sized(problem: ServingProblem, pool: Pool, store: str) -> SizedTier | None:
    """A store for a pool's layout; None where nobody says how much of it there is, or weights took all of it."""
    machine, site, workload = problem.machines[pool.node_type], problem.site, problem.workload
    largest = largest_tier(machine, store)
    if largest is None:
        return None
    if store == "host":
        rate = min(largest.bytes_per_s_per_device, link_bytes_per_s(machine.device))
        largest = replace(largest, bytes_per_s_per_device=rate)
    room = largest.bytes_per_device
    if pool.weight_tiers is not None and store != "nvme":
        room -= pool.weight_tiers.host_bytes / pool.layout.num_devices
    if room <= 0.0:
        return None
    plain = replace(pool, kv_tier=None)
    each = pool_memory(site, plain, workload).kv_bytes_per_token
    holders = pool.layout.attention_data_parallel * (pool.num_workers if store == "remote" else 1)
    needed = tokens_for(workload, FOUND) * each / holders
    prompt, _ = workload.mean_lengths
    cost = pool_worker(site, plain, workload).step_cost()
    seconds = prefill_s(cost, prompt, cached=0.0, budget=pool.limits.max_batched_tokens)
    return SizedTier(
        tier=replace(largest, bytes_per_device=min(needed, room)),
        needed_bytes_per_device=needed,
        break_even_bytes_per_s=break_even_bytes_per_s(each, prompt / seconds),
    )


def search_with_stores(
    problem: ServingProblem, *, seed: int, budget: Budget | None, on_progress: OnProgress | None
) -> Chosen:
    """The best deployment with a tier in one of the question's stores, or with none; see the module's text."""

    def searched(tier: KvTier | None) -> tuple[ServingProblem, Solution[Simulated], ServingReport]:
        asked = replace(problem, kv_tier=tier)
        return asked, *search_serving(asked, seed=seed, budget=budget, on_progress=on_progress)

    best = searched(None)
    looked = best[1].assignment or next(iter(best[2].simulated), None)
    rows, solutions = list[dict[str, Any]](), [best[1]]
    for store in problem.kv_stores:
        option = None if looked is None else sized(problem, looked.candidate.config.pools[0], store)
        if option is None or not option.pays:
            rows.append(_row(store, option, None))
            continue
        made = searched(option.tier)
        solutions.append(made[1])
        again = None if made[1].assignment is None else _other_size(problem, made[1].assignment, option)
        if again is not None:
            second = searched(again.tier)
            solutions.append(second[1])
            if _better(second[1], made[1], by=-TIE):
                option, made = again, second
        rows.append(_row(store, option, made[1]))
        if _better(made[1], best[1], by=TIE):
            best = made
    chosen = best[0].kv_tier
    for row in rows:
        row["is_chosen"] = chosen is not None and row["store"] == chosen.store
    return Chosen(problem=best[0], solution=_of_all(best[1], solutions), report=best[2], stores=rows)


def _of_all(chosen: Solution[Simulated], searched: list[Solution[Simulated]]) -> Solution[Simulated]:
    """The chosen one with the effort and the least bound of all searches; never optimal, as no size is proven."""
    cpu_s, wall_s = sum(one.cpu_s for one in searched), sum(one.wall_s for one in searched)
    if chosen.objective is None:
        return replace(chosen, cpu_s=cpu_s, wall_s=wall_s)
    bound = min(one.bound for one in searched if one.bound is not None)
    gap = relative_gap(chosen.objective, bound)
    return replace(chosen, bound=bound, gap=gap, status=Status.FEASIBLE, cpu_s=cpu_s, wall_s=wall_s)


def _other_size(problem: ServingProblem, made: Simulated, option: SizedTier) -> SizedTier | None:
    """The tier in the size of the deployment that was found with it, where that is another."""
    pool = made.candidate.config.pools[0]
    if pool.kv_tier is None:
        return None
    own = sized(problem, pool, option.tier.store)
    if own is None or abs(own.tier.bytes_per_device / option.tier.bytes_per_device - 1.0) <= _SAME_SIZE:
        return None
    return own


def _better(one: Solution[Simulated], other: Solution[Simulated], *, by: float) -> bool:
    """Whether one objective is lower than another by a share of it."""
    if one.objective is None:
        return False
    return other.objective is None or other.objective - one.objective > by * abs(other.objective)


def _row(store: str, option: SizedTier | None, solution: Solution[Simulated] | None) -> dict[str, Any]:
    """What was found of a store, as plain JSON."""
    if option is None:
        reason = "nothing is known of its size, or weights take it"
        return {"store": store, "reason": reason}
    tier = option.tier
    reason = ""
    if not option.pays:
        reason = "slower than computing prefixes again"
    elif solution is None or solution.objective is None:
        reason = "no deployment with it meets every SLO"
    return {
        "store": store,
        "bytes_per_device": tier.bytes_per_device,
        "needed_bytes_per_device": option.needed_bytes_per_device,
        "bytes_per_s_per_device": tier.bytes_per_s_per_device,
        "break_even_bytes_per_s_per_device": option.break_even_bytes_per_s,
        "objective": None if solution is None else solution.objective,
        "reason": reason,
    }
