"""Whole replicas: branch and bound over the fleet, with dives for good fleets early.

Notation (loads and relaxation: the two files before this one)
    m_g   usable replicas of type g, whole; n_g = m_g + spare when m_g > 0, else 0, are rented
    c_g   USD/h of one replica

Objective      min Σ_g c_g · m_g + c_g · spare · [m_g > 0]
Constraints    utilization_g · m_g ≥ ℓ_g for some load vector ℓ of the polytope; m_g ≤ max_count_g − spare

The step at m_g = 0 (the spares) needs no indicator: within a box low ≤ m ≤ high its convex envelope is a line, of
slope c_g · (1 + spare / high_g) where low_g = 0, and exact once the box excludes 0. So a type is branched on where m_g
is fractional *or* where the envelope still lies below the true cost.

Bound          the least bound of the open boxes; where all prices are multiples of some step (cents), so are all
               costs, and a box within one step of the best fleet is closed.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from meshplan.planner.solvers.gpu_allocation_cuts import sharpen
from meshplan.planner.solvers.gpu_allocation_exchange import CutPool, improve
from meshplan.planner.solvers.gpu_allocation_instance import Instance
from meshplan.planner.solvers.gpu_allocation_loads import FloatArray, LoadPolytope
from meshplan.planner.solvers.gpu_allocation_relaxation import EXACT, WHOLE, FleetRelaxation, Relaxed, balance
from meshplan.planner.solvers.solution import OnProgress, Progress

# Relative distance at which the relaxation of a wide problem is good enough to branch on.
_ROUGH = 1e-4
# Price of a missing replica, relative to a real one; raised where the loads call for it.
_PENALTY, _MOST_RAISES = 1e3, 4
# Narrow problems are mostly proven before a dive would pay; wide ones start with one.
_NODES_BEFORE_DIVES, _NODES_BETWEEN_DIVES = 100, 40
_PRICE_DECIMALS = 6
# Relative distance within which the bound of a whole box counts as met by the best fleet.
_MET = 1e-8
# Share of a wide problem's budget for branch and bound; integer programs over its cuts get the rest.
_SEARCH_SHARE = 0.45
# Types searched apart: at most this share of all, with this share of the budget.
_FEW_TYPES, _FEW_TYPES_WORK = 0.5, 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The best fleet found and what no fleet can beat.

    Args:
        usable: [types] whole usable replicas; None when none was found.
        cost: USD/h; ∞ when none was found.
        bound: USD/h.
        nodes: boxes examined.
        prices: [types] USD/h of a busy replica in the relaxation of the whole problem.
    """

    usable: FloatArray | None
    cost: float
    bound: float
    nodes: int
    prices: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop short of a proof.

    Args:
        work_s: estimated processor seconds, the same on every machine and run; ∞ for none.
        deadline_s: value of ``time.monotonic()``; ∞ for none.
    """

    work_s: float
    deadline_s: float

    def part(self, share: float) -> Budget:
        """The first part of the budget."""
        deadline = self.deadline_s
        if math.isfinite(deadline):
            deadline = time.monotonic() + share * (deadline - time.monotonic())
        return Budget(work_s=share * self.work_s, deadline_s=deadline)

    def spent(self, work_s: float) -> bool:
        """Whether to stop."""
        return work_s >= self.work_s or time.monotonic() >= self.deadline_s


@dataclass(frozen=True, slots=True)
class _Box:
    low: FloatArray
    high: FloatArray
    relaxed: Relaxed


class FleetSearch:
    """Finds the cheapest whole fleet for one load polytope.

    Args:
        instance: the arrays of the problem; every bucket has a type with usable replicas that can serve it.
        budget: when to stop.
        on_progress: called when the incumbent improves.
    """

    def __init__(self, instance: Instance, budget: Budget, on_progress: OnProgress | None = None) -> None:
        self._instance = instance
        self._load, self._price, self._utilization = instance.load, instance.price, instance.utilization
        self._most, self._spare, self._budget = instance.most, instance.spare, budget
        self._on_progress = on_progress
        load, price, utilization = instance.load, instance.price, instance.utilization
        start = price / utilization
        start = np.maximum(start, 1e-9 * max(float(start.max()), 1e-9))
        polytope = LoadPolytope(load, start)
        self._cuts = CutPool(len(price))
        self._relaxation = FleetRelaxation(polytope, utilization, _PENALTY * start, self._cuts.add)
        self._exchange_work_s = 0.0
        self._few_tried: set[bytes] = set()
        self._relaxation.start_from(polytope.cheapest(start))
        self._tolerance = EXACT if instance.narrow else _ROUGH
        self._step = price_step(price)
        self._best: FloatArray | None = None
        self._cost = math.inf
        self._nodes = 0
        self._least_whole = math.inf
        self._prices = start

    def sharpened(self, fleet: Fleet, budget: Budget) -> Fleet:
        """The fleet that integer programs over the cuts make of what the search has found, within the whole budget."""
        if fleet.usable is None or fleet.bound >= fleet.cost:
            return fleet
        spent = self._relaxation.work_s + self._exchange_work_s
        left = min(budget.work_s - spent, budget.deadline_s - time.monotonic())
        found = sharpen(self._instance, fleet.usable, fleet.cost, fleet.bound, self._cuts, work_s=left)
        self._accept(found.usable)
        return Fleet(usable=found.usable, cost=found.cost, bound=found.bound, nodes=self._nodes, prices=fleet.prices)

    def run(self) -> Fleet:
        """Search until the bound meets the best fleet or the budget is spent."""
        root = self._relax(np.zeros_like(self._most), self._most)
        heap: list[tuple[float, int, _Box]] = [] if root is None else [(root.relaxed.bound, 0, root)]
        pushed = 0
        next_dive = 0 if self._tolerance > EXACT else _NODES_BEFORE_DIVES
        while heap and heap[0][0] < self._cutoff() and not self._spent():
            if self._nodes >= next_dive:
                next_dive = self._nodes + _NODES_BETWEEN_DIVES
                self._dive(heap[0][2])
                self._exchange()
                self._search_few_types(heap[0][2].relaxed.usable)
            bound, _, box = heapq.heappop(heap)
            for child in self._branch(box):
                pushed += 1
                heapq.heappush(heap, (max(bound, child.relaxed.bound), pushed, child))
        bound = heap[0][0] if heap and heap[0][0] < self._cutoff() else self._cost
        if self._least_whole < self._cost * (1.0 - _MET):
            bound = min(bound, self._least_whole)
        return Fleet(
            usable=self._best, cost=self._cost, bound=min(bound, self._cost), nodes=self._nodes, prices=self._prices
        )

    def _spent(self) -> bool:
        return self._budget.spent(self._relaxation.work_s + self._exchange_work_s)

    def _exchange(self) -> None:
        """Exchange replicas of the best fleet until no better one is found nearby."""
        while self._best is not None and not self._spent():
            better, work_s = improve(self._instance, self._best, self._cost, self._cutoff(), self._cuts)
            self._exchange_work_s += work_s
            if better is None:
                return
            self._accept(better)

    def _search_few_types(self, relaxed: FloatArray) -> None:
        """Search apart the types of the best fleet and of the relaxation: fewer types, far fewer boxes."""
        if self._best is None or self._tolerance <= EXACT or self._spent():
            return
        few = np.flatnonzero((self._best > 0) | (relaxed > WHOLE))
        if few.tobytes() in self._few_tried or len(few) > len(self._price) * _FEW_TYPES:
            return
        self._few_tried.add(few.tobytes())
        part = self._instance.only(few)
        work_s = _FEW_TYPES_WORK * self._budget.work_s if math.isfinite(self._budget.work_s) else _FEW_TYPES_WORK
        search = FleetSearch(part, Budget(work_s=work_s, deadline_s=self._budget.deadline_s))
        search._best, search._cost = self._best[few], self._cost
        found = search.run()
        self._exchange_work_s += search._relaxation.work_s + search._exchange_work_s
        if found.usable is not None and found.cost < self._cost:
            whole = np.zeros_like(self._best)
            whole[few] = found.usable
            self._accept(whole)

    def _cutoff(self) -> float:
        """A box whose bound reaches this holds no better fleet than the best one."""
        if math.isinf(self._cost):
            return math.inf
        slack = EXACT * self._cost / 2
        return self._cost - max(self._step - slack, slack)

    def _relax(self, low: FloatArray, high: FloatArray) -> _Box | None:
        """Relax a box and take note of the fleet near its solution; None when nothing better is inside."""
        self._nodes += 1
        tolerance, raises = self._tolerance, 0
        while True:
            opened = low > 0
            envelope = self._price * (1.0 + np.where(opened, 0.0, self._spare / np.maximum(high, 1.0)))
            constant = float(self._price[opened].sum()) * self._spare
            relaxed = self._relaxation.solve(
                envelope, low, high, cutoff=self._cutoff(), constant=constant, tolerance=tolerance
            )
            if self._nodes == 1:
                self._prices = relaxed.prices
            if relaxed.bound >= self._cutoff():
                return None
            if relaxed.missing > WHOLE * (1.0 + float(self._utilization @ high)) and raises < _MOST_RAISES:
                found = balance(self._load, self._utilization * high, tolerance=WHOLE)
                if found is None or found.bound > 1.0 + WHOLE:
                    return None
                if found.peak <= 1.0 + WHOLE:
                    raises += 1
                    self._relaxation.raise_penalty(_PENALTY)
                    continue
                return None
            self._consider(relaxed.needed)
            if relaxed.bound >= self._cutoff():
                return None
            if tolerance > EXACT and self._branching_type(relaxed.usable, low, high) is None:
                tolerance = EXACT  # whole, but not yet proven: solve to the end
                continue
            return _Box(low, high, relaxed)

    def _consider(self, needed: FloatArray) -> None:
        """Round up: what a fractional fleet carries, the next whole one carries too."""
        whole = round_up(needed)
        if not (whole > self._most).any():
            self._accept(whole)

    def _accept(self, whole: FloatArray) -> None:
        """Keep a fleet that works if it is the cheapest so far."""
        cost = float(self._price @ (whole + self._spare * (whole > 0)))
        if cost < self._cost * (1.0 - EXACT):
            self._best, self._cost = whole, cost
            if self._on_progress is not None:
                self._on_progress(Progress(incumbent=cost, bound=None, note=f"branch and bound, box {self._nodes}"))

    def _branching_type(self, usable: FloatArray, low: FloatArray, high: FloatArray) -> int | None:
        """The type whose whole number costs most to ignore; None when the relaxation is exact here."""
        nearest = np.round(usable)
        distance = np.abs(usable - nearest)
        score = np.where(distance > WHOLE * np.maximum(1.0, nearest), distance, 0.0)
        if self._spare:
            inside = (low == 0) & (nearest > 0) & (usable < high - WHOLE)
            score = np.where(inside, np.maximum(score, self._spare * (1.0 - usable / np.maximum(high, 1.0))), score)
        if not score.any():
            return None
        weighted = score * np.maximum(self._price, 1e-9)
        return int(weighted.argmax())

    def _branch(self, box: _Box) -> list[_Box]:
        """Cut the box in two at a type's count."""
        usable = box.relaxed.usable
        g = self._branching_type(usable, box.low, box.high)
        if g is None:  # whole: the fleet in it has been taken note of, unless a capacity is met to the last digit
            self._least_whole = min(self._least_whole, box.relaxed.bound)
            return []
        nearest = round(float(usable[g]))
        at = nearest if abs(usable[g] - nearest) <= WHOLE * max(1.0, nearest) else math.floor(usable[g])
        if self._spare and box.low[g] == 0 and at >= 1:
            at = 0  # in use or not: decides about the spares
        down, up = box.high.copy(), box.low.copy()
        down[g], up[g] = at, at + 1
        children = [self._relax(box.low, down)]
        if up[g] <= box.high[g]:
            children.append(self._relax(up, box.high))
        return [child for child in children if child is not None]

    def _dive(self, box: _Box) -> None:
        """Round one type after the other and relax again after each: dear types first, cheap ones make up the rest."""
        current: _Box | None = box
        while current is not None and not self._spent():
            usable, low, high = current.relaxed.usable, current.low, current.high
            nearest = np.round(usable)
            distance = np.abs(usable - nearest)
            fractional = (distance > WHOLE * np.maximum(1.0, nearest)) & (low < high)
            if not fractional.any():
                return
            g = int(np.where(fractional, self._price + 1e-9, 0.0).argmax())
            down, up = high.copy(), low.copy()
            down[g], up[g] = math.floor(usable[g]), math.ceil(usable[g])
            choices = [(low, down), (up, high)]
            if nearest[g] > usable[g]:
                choices.reverse()
            current = self._relax(*choices[0]) or self._relax(*choices[1])


def cheapest_fleet(instance: Instance, budget: Budget, on_progress: OnProgress | None = None) -> Fleet | None:
    """The best fleet within a budget; None when no fleet carries the load.

    Every bucket must have a type with usable replicas that can serve it.
    """
    if not instance.load.shape[1]:
        nothing = np.zeros_like(instance.price)
        return Fleet(usable=nothing, cost=0.0, bound=0.0, nodes=0, prices=nothing)
    first = budget if instance.narrow else budget.part(_SEARCH_SHARE)
    search = FleetSearch(instance, first, on_progress)
    fleet = search.run()
    if fleet.usable is not None:
        return fleet if instance.narrow else search.sharpened(fleet, budget)
    # No whole fleet came up on the way: everything that can be had decides.
    everything = balance(instance.load, instance.utilization * instance.most)
    if everything is None or everything.bound > 1.0 + WHOLE:
        return None
    carried = (everything.shares * np.where(instance.servable, instance.load, 0.0)).sum(axis=1)
    usable = np.minimum(round_up(carried / instance.utilization), instance.most)
    cost = float(instance.price @ (usable + instance.spare * (usable > 0)))
    return Fleet(usable=usable, cost=cost, bound=min(fleet.bound, cost), nodes=fleet.nodes, prices=fleet.prices)


def round_up(usable: FloatArray) -> FloatArray:
    """The next whole counts; numbers within :data:`WHOLE` of one count as whole, anything above 0 as 1."""
    whole = np.ceil(usable - WHOLE * np.maximum(1.0, usable))
    rounded: FloatArray = np.where(usable > 0, np.maximum(whole, 1.0), 0.0)
    return rounded


def price_step(price: FloatArray) -> float:
    """The greatest step of which all prices are multiples, USD/h; 0 when they have more than six decimals.

    >>> price_step(np.array([0.7, 1.01, 3.67]))
    0.01
    """
    scale: int = 10**_PRICE_DECIMALS
    scaled = [Decimal(repr(float(value))) * scale for value in price]
    if any(value != value.to_integral_value() for value in scaled):
        return 0.0
    return float(math.gcd(*(int(value) for value in scaled)) / scale)
