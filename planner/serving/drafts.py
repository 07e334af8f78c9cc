"""Which method and depth of speculative decoding is best by load, and from which load on none is.

The search (:mod:`meshplan.planner.serving.search.search`) takes every option as a choice of a deployment, bounds and
simulates it like any other. This table says in closed form what is best at other loads of the same worker.

With n running requests a decode iteration takes d(n), drafts and the verification of all drafted tokens included
(:mod:`meshplan.planner.serving.estimator.step_cost`), and yields g tokens a request; each request's prompt adds F(n) to
the o tokens of its answer. The time per token is that of the steady state
(:mod:`meshplan.planner.serving.estimator.steady_state`), d(n)/g + n/(o − 1)·F(n): verification is nearly free while
weights are read for few tokens, and costs as much as decoding once products are bound by arithmetic or experts by
their number. Queueing and the uneven number of running requests are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.planner.serving.estimator.pools import pool_worker, scheduled
from meshplan.planner.serving.estimator.steady_state import SteadyState, steady_state
from meshplan.planner.serving.problem.config import Pool, Speculation
from meshplan.planner.serving.problem.problem import ServingProblem, Site
from meshplan.planner.serving.problem.requests import ServingWorkload
from meshplan.planner.serving.search.branch import Simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationAtLoad:
    """The best choice for so many running requests of one worker.

    Args:
        num_running: decoding requests.
        best: None where decoding without drafts is fastest.
        speed_up: time per token without drafts over that with the best drafts, which may be below 1.
    """

    num_running: int
    best: Speculation | None
    speed_up: float


def speculation_by_load(
    site: Site, pool: Pool, workload: ServingWorkload, options: Sequence[Speculation]
) -> tuple[SpeculationAtLoad, ...]:
    """The best option at 1, 2, 4 … running requests of a worker of ``pool``, up to its slots.

    Args:
        site: model, hardware and engine.
        pool: the worker, whose layout is kept.
        workload: how long prompts and answers are.
        options: at least one.
    """
    alone = _steady(site, pool, workload, None)
    each = [_steady(site, pool, workload, option) for option in options]
    rows = []
    for running in _loads(pool.limits.max_num_seqs):
        at = int(np.searchsorted(alone.num_seqs, running))
        least = min(range(len(options)), key=lambda index: each[index].tpot_s[at])
        with_drafts_s = float(each[least].tpot_s[at])
        # Answers of one token leave nothing to draft.
        speed_up = float(alone.tpot_s[at]) / with_drafts_s if with_drafts_s > 0.0 else 1.0
        rows.append(
            SpeculationAtLoad(
                num_running=running,
                best=options[least] if speed_up > 1.0 else None,
                speed_up=speed_up,
            )
        )
    return tuple(rows)


def _steady(site: Site, pool: Pool, workload: ServingWorkload, drafts: Speculation | None) -> SteadyState:
    prompt, output = workload.mean_lengths
    return steady_state(
        pool_worker(site, pool, workload, drafts).step_cost(),
        role=pool.role,
        prompt=prompt,
        output=output,
        cached=prompt * workload.prefix_hit_rate,
        budget=scheduled(pool, site.recipe, workload).max_batched_tokens,
        most=pool.limits.max_num_seqs,
    )


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


def drafts_by_load(problem: ServingProblem, chosen: Simulated) -> dict[str, Any]:
    """What is best by load of a worker of the chosen layout, as plain JSON.

    Args:
        problem: the question, its options among which was chosen.
        chosen: the deployment; the load of its workers is that of its simulation.
    """
    pool = chosen.candidate.config.pools[-1]
    rows = speculation_by_load(problem.site, pool, problem.workload, problem.speculation_options)
    return {
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
        "running": chosen.judged.metrics.mean_decoding / pool.num_workers,
    }
