"""Which method and depth of speculative decoding is best by load, and from which load on none is.

With n running requests whose contexts hold C tokens a decode iteration takes t(n, C), drafts and the verification of
all drafted tokens included (:mod:`meshplan.planner.serving.estimator.step_cost`), and yields g tokens a request. The
time per token is t/g: verification is nearly free while weights are read for few tokens, and costs as much as decoding
once products are bound by arithmetic or experts by their number.

:func:`search_with_speculation` searches twice: without drafts, and with the option that this comparison finds best for
the load of the deployment found first; the better of the two is the plan. Its bound is the lower of both. Options that
were not searched are ruled out by the comparison, not by a proof, so that such a plan is feasible, never optimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Solution, Status, relative_gap
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import Pool, Speculation
from meshplan.planner.serving.problem.problem import ServingProblem, Site
from meshplan.planner.serving.problem.requests import ServingWorkload
from meshplan.planner.serving.search.branch import TIE, Simulated
from meshplan.planner.serving.search.search import ServingReport, search_serving


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationAtLoad:
    """The best choice for so many running requests of one worker.

    Args:
        num_running: decoding requests.
        best: None where decoding without drafts is fastest.
        speed_up: time per token without drafts over that with the best drafts, which may be below 1.
        fastest: the best of the drafts, whether or not it is better than none.
    """

    num_running: int
    best: Speculation | None
    speed_up: float
    fastest: Speculation


def speculation_by_load(
    site: Site, pool: Pool, workload: ServingWorkload, options: Sequence[Speculation]
) -> tuple[SpeculationAtLoad, ...]:
    """The best option at 1, 2, 4 … running requests of a worker of ``pool``, up to its slots.

    Args:
        site: model, hardware and engine.
        pool: the worker, whose layout is kept.
        workload: how long contexts are.
        options: at least one.
    """
    plain = pool_worker(site, pool, workload)
    context = (plain.contexts.least + plain.contexts.most) / 2.0
    without = plain.step_cost()
    costs = [(option, pool_worker(site, pool, workload, option).step_cost()) for option in options]
    rows = []
    for running in _loads(pool.limits.max_num_seqs):
        alone = without.step_s(running, running * context, 0, 0, 0.0)
        times = [cost.step_s(running, running * context, 0, 0, 0.0) / cost.tokens_per_step for _, cost in costs]
        least = min(range(len(times)), key=lambda index: times[index])
        fastest = costs[least][0]
        rows.append(
            SpeculationAtLoad(
                num_running=running,
                best=fastest if times[least] < alone else None,
                speed_up=alone / times[least],
                fastest=fastest,
            )
        )
    return tuple(rows)


def hurts_from(rows: Sequence[SpeculationAtLoad]) -> int | None:
    """The least load from which on no option helps at any higher one; None where one helps at the highest."""
    found: int | None = None
    for row in reversed(rows):
        if row.best is not None:
            break
        found = row.num_running
    return found


def _loads(most: int) -> list[int]:
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]
    return powers if powers[-1] == most else [*powers, most]


def search_with_speculation(
    problem: ServingProblem, *, seed: int, budget: Budget | None, on_progress: OnProgress | None
) -> tuple[ServingProblem, Solution[Simulated], ServingReport, dict[str, Any] | None]:
    """The best deployment with or without drafts; see the module's text.

    Returns:
        The problem with the chosen drafts, the solution and the record of its search, and what is best by load as plain
        JSON; None where there is nothing to choose.
    """
    plain, report = search_serving(problem, seed=seed, budget=budget, on_progress=on_progress)
    if not problem.speculation_options or plain.assignment is None:
        return problem, plain, report, None
    config, running = plain.assignment.candidate.config, plain.assignment.judged.metrics.mean_decoding
    pool = config.pools[-1]
    each = running / pool.num_workers
    rows = speculation_by_load(problem.site, pool, problem.workload, problem.speculation_options)
    document = {
        "by_load": [
            {
                "num_running": row.num_running,
                "method": None if row.best is None else row.best.method,
                "num_draft_tokens": 0 if row.best is None else row.best.num_draft_tokens,
                "speed_up": row.speed_up,
            }
            for row in rows
        ],
        "hurts_from": hurts_from(rows),
        "running": each,
    }
    here = min(rows, key=lambda row: abs(row.num_running - each))
    other = replace(problem, speculation=here.fastest)
    drafted, drafted_report = search_serving(other, seed=seed, budget=budget, on_progress=on_progress)
    is_whole = len(problem.speculation_options) == 1
    if drafted.objective is None or plain.objective is None or drafted.objective >= plain.objective:
        return problem, with_bound(plain, drafted, is_whole=is_whole), report, document
    return other, with_bound(drafted, plain, is_whole=is_whole), drafted_report, document


def with_bound(chosen: Solution[Simulated], other: Solution[Simulated], *, is_whole: bool) -> Solution[Simulated]:
    """The chosen solution with the lower bound of both searches, and its gap by that; optimal if no option is left."""
    if chosen.objective is None or chosen.bound is None or other.bound is None:
        return chosen
    bound = min(chosen.bound, other.bound)
    gap = relative_gap(chosen.objective, bound)
    status = chosen.status if is_whole and gap <= max(TIE, chosen.gap or 0.0) else Status.FEASIBLE
    cpu_s, wall_s = chosen.cpu_s + other.cpu_s, chosen.wall_s + other.wall_s
    return replace(chosen, bound=bound, gap=gap, status=status, cpu_s=cpu_s, wall_s=wall_s)
