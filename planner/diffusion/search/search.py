"""The best degrees, batch and replicas: all that the rules allow are priced, so that the least cost is a proof.

Where costs lie closer together than the tie width of the constants, the simpler configuration is taken
(:mod:`meshplan.planner.diffusion.search.preference`); ``gap`` says what that gives away. Fewest devices are a whole
number without ties: among plans with as many, the one with the least latency is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray
from meshplan.planner.diffusion.problem.degrees import DiffusionConfig
from meshplan.planner.diffusion.problem.legality import candidates
from meshplan.planner.diffusion.problem.problem import MAX_UTILIZATION, DiffusionProblem
from meshplan.planner.diffusion.problem.spec import DiffusionObjective
from meshplan.planner.diffusion.search.preference import preferred
from meshplan.planner.diffusion.search.priced import Priced, cost, priced

MEMORY, LATENCY, COST = "memory", "slo.latency_s", "slo.usd_per_item"
DEVICES, MONEY, POWER = "devices", "constraints.max_usd_per_hour", "constraints.max_power_w"
RATE = "request_rate_per_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """All candidates, and the best of those that keep every limit.

    Args:
        found: all legal candidates; None where there is none.
        cost: of the objective, [n].
        broken: limit → mask of the candidates that break it, [n].
        best: index of the chosen candidate; None where every one breaks a limit.
        least_cost: of all that keep every limit.
        illegal: reason → how many combinations of degrees it rules out.
    """

    found: Priced | None
    cost: FloatArray
    broken: Mapping[str, BoolArray]
    best: int | None
    least_cost: float
    illegal: Counter[str]

    @property
    def kept(self) -> BoolArray:
        """[n] Candidates that keep every limit."""
        return ~np.any(np.stack(list(self.broken.values())), axis=0)


def search(problem: DiffusionProblem) -> Searched:
    """Enumerate, price, choose."""
    illegal: Counter[str] = Counter()
    configs = list(candidates(problem, illegal))
    if not configs:
        return Searched(found=None, cost=np.zeros(0), broken={}, best=None, least_cost=np.nan, illegal=illegal)
    found = priced(problem, configs)
    prices = cost(problem, found)
    limits = broken_limits(problem, found)
    searched = Searched(found=found, cost=prices, broken=limits, best=None, least_cost=np.nan, illegal=illegal)
    kept = np.flatnonzero(searched.kept)
    if not len(kept):
        return searched
    chosen = kept[_chosen(problem, [configs[i] for i in kept], prices[kept], found.latency_s[kept])]
    return Searched(
        found=found,
        cost=prices,
        broken=limits,
        best=int(chosen),
        least_cost=float(prices[kept].min()),
        illegal=illegal,
    )


def broken_limits(problem: DiffusionProblem, found: Priced) -> dict[str, BoolArray]:
    """Limit → mask of the candidates that break it; a figure that is unknown breaks none."""

    def above(values: FloatArray, limit: float | None) -> BoolArray:
        return np.zeros(len(values), dtype=bool) if limit is None else values > limit

    rate = problem.request_rate_per_s
    overloaded = np.zeros(len(found.configs), dtype=bool)
    if rate is not None and "replicas" in problem.pinned:
        overloaded = found.items_per_s * MAX_UTILIZATION < rate
    return {
        MEMORY: found.memory.bound_bytes > problem.machine.device.usable_memory_bytes,
        DEVICES: found.replicas > found.room,
        RATE: overloaded,
        LATENCY: above(found.latency_s, problem.max_latency_s),
        COST: above(found.usd_per_item, problem.max_usd_per_item),
        MONEY: above(found.usd_per_hour, problem.max_usd_per_hour),
        POWER: above(found.power_w, problem.max_power_w),
    }


def _chosen(
    problem: DiffusionProblem, configs: list[DiffusionConfig], prices: FloatArray, latency_s: FloatArray
) -> int:
    if problem.objective is DiffusionObjective.NUM_DEVICES:
        fewest = np.flatnonzero(prices == prices.min())
        within = preferred([configs[i] for i in fewest], latency_s[fewest], tie=problem.calibration.tie)
        return int(fewest[within])
    return preferred(configs, prices, tie=problem.calibration.tie)
