"""Branch and bound over the replica counts of a fleet, with a diving heuristic for good fleets early.

Notation (the load polytope: :mod:`~meshplan.planner.gpu_allocation.replicas.loads`)
    m_g   usable replicas of type g, whole; n_g = m_g + spare when m_g > 0, else 0, are rented
    c_g   USD/h of one replica

Objective      min Σ_g c_g · m_g + c_g · spare · [m_g > 0]
Constraints    utilization_g · m_g ≥ ℓ_g for some load vector ℓ of the polytope; m_g ≤ max_count_g − spare

The step at m_g = 0 (the spares) needs no indicator: within a box low ≤ m ≤ high its convex envelope is a line, of
slope c_g · (1 + spare / high_g) where low_g = 0, and exact once the box excludes 0. So a type is branched on where m_g
is fractional *or* where the envelope still lies below the true cost.

Near-identical types substitute for each other, so a bound on one of them alone proves little. They form families, and
boxes bound the replicas of a family together as well, low_f ≤ Σ_{g in f} m_g ≤ high_f; families are branched on first.

Bound          the least bound of the open boxes; where all prices are multiples of some step (cents), so are all
               costs, and a box within one step of the best fleet is closed.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, field

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Progress
from meshplan.planner.gpu_allocation.replicas.cuts import sharpen
from meshplan.planner.gpu_allocation.replicas.exchange import CutPool, improve
from meshplan.planner.gpu_allocation.replicas.instance import Instance, families, price_step
from meshplan.planner.gpu_allocation.replicas.loads import LoadPolytope
from meshplan.planner.gpu_allocation.replicas.relaxation import EXACT, WHOLE, FleetRelaxation, Relaxed, balance

# Relative distance at which the relaxation of a wide problem is good enough to branch on.
_ROUGH = 1e-4
# Price of a missing replica, relative to a real one; raised where the loads call for it.
_PENALTY, _MOST_RAISES = 1e3, 4
# Boxes before the first dive (narrow problems are mostly proven by then; wide ones start with one) and between dives.
_NODES_BEFORE_DIVES, _NODES_BETWEEN_DIVES = 100, 40
# Relative distance within which the bound of a whole box counts as met by the best fleet.
_MET = 1e-8
# Share of a wide problem's budget for branch and bound; integer programs over its cuts get the rest.
_SEARCH_SHARE = 0.5
# Wide problems raise the bound of all boxes to this relative distance of the best fleet, then to half of it, and so on
# down to the least, then without a goal: a box is not looked at more closely than the goal asks for.
_FIRST_GAP, _LEAST_GAP = 0.008, 5e-4
# Share of the budget that the exchanges after a dive may take.
_EXCHANGE_SHARE = 0.2
# Relative distance from which integer programs hardly bring cost and bound closer: large fleets round well.
_CLOSE = 2e-3
# A family is branched on where its replicas lie at least this far from a whole number.
_FAMILY_FRACTIONAL = 0.02


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
class WorkBudget:
    """When to stop short of a proof.

    Args:
        work_s: estimated processor seconds, the same on every machine and run; ∞ for none.
        deadline_s: value of ``time.monotonic()``; ∞ for none.
        question: budget of the whole answer.
    """

    work_s: float
    deadline_s: float
    question: Budget = field(default_factory=Budget)

    def part(self, share: float) -> WorkBudget:
        """The first part of the budget."""
        deadline = self.deadline_s
        if math.isfinite(deadline):
            deadline = time.monotonic() + share * (deadline - time.monotonic())
        return WorkBudget(work_s=share * self.work_s, deadline_s=deadline, question=self.question)

    def spent(self, work_s: float) -> bool:
        """Whether to stop."""
        return work_s >= self.work_s or time.monotonic() >= self.deadline_s or bool(self.question.stopped)


@dataclass(frozen=True, slots=True)
class _Box:
    """Fleets between two counts of every type and family.

    Args:
        low: [types + families].
        high: [types + families].
        relaxed: solution of the box's relaxation.
        is_stopped: the relaxation was stopped at the goal (see ``_goal``), too early to branch on.
    """

    low: FloatArray
    high: FloatArray
    relaxed: Relaxed
    is_stopped: bool = False


class FleetSearch:
    """Finds the cheapest whole fleet for one load polytope.

    Args:
        instance: the arrays of the problem; every bucket has a type with usable replicas that can serve it.
        budget: when to stop.
        on_progress: called when the incumbent improves.
    """

    def __init__(self, instance: Instance, budget: WorkBudget, on_progress: OnProgress | None = None) -> None:
        self._instance = instance
        self._load, self._price, self._utilization = instance.load, instance.price, instance.utilization
        self._most, self._spare, self._budget = instance.most, instance.spare, budget
        self._on_progress = on_progress
        load, price, utilization = instance.load, instance.price, instance.utilization
        start = price / utilization
        start = np.maximum(start, 1e-9 * max(float(start.max()), 1e-9))
        polytope = LoadPolytope(load, start)
        self._cuts = CutPool(len(price))
        self._members = families(instance)
        # Price of what is branched on: of each type, and of each family the mean over its types.
        self._rent = np.concatenate([price, self._members @ price / np.maximum(self._members.sum(axis=1), 1.0)])
        num_types = len(price)
        self._dear = np.zeros(len(self._rent), dtype=bool)
        if len(self._members):
            self._dear[num_types:] = self._rent[num_types:] > np.median(self._rent[num_types:])
        self._relaxation = FleetRelaxation(polytope, utilization, self._members, _PENALTY * start, self._cuts.add)
        self._exchange_work_s = 0.0
        self._relaxation.start_from(polytope.cheapest(start))
        self._tolerance = EXACT if instance.narrow else _ROUGH
        self._gap = 0.0 if instance.narrow else _FIRST_GAP
        self._step = price_step(price)
        self._best: FloatArray | None = None
        self._cost = math.inf
        self._nodes = 0
        self._least_whole = math.inf
        self._prices = start

    def sharpened(self, fleet: Fleet, budget: WorkBudget) -> Fleet:
        """The fleet and bound after integer programs over the cuts have improved both, within the whole budget."""
        if fleet.usable is None or fleet.bound >= fleet.cost * (1.0 - _CLOSE):
            return fleet
        spent = self._relaxation.work_s + self._exchange_work_s
        left = min(budget.work_s - spent, budget.deadline_s - time.monotonic())
        found = sharpen(
            self._instance, fleet.usable, fleet.cost, fleet.bound, self._cuts, work_s=left, budget=budget.question
        )
        self._accept(found.usable)
        return Fleet(usable=found.usable, cost=found.cost, bound=found.bound, nodes=self._nodes, prices=fleet.prices)

    def run(self) -> Fleet:
        """Search until the bound meets the best fleet or the budget is spent."""
        most = np.concatenate([self._most, self._members @ self._most])
        root = self._relax(np.zeros_like(most), most)
        heap: list[tuple[float, int, _Box]] = [] if root is None else [(root.relaxed.bound, 0, root)]
        pushed = 0
        next_dive = 0 if self._tolerance > EXACT else _NODES_BEFORE_DIVES
        pause, together = _NODES_BETWEEN_DIVES, True
        while heap and heap[0][0] < self._cutoff() and not self._spent():
            if heap[0][0] >= self._goal():
                self._gap = self._gap / 2.0 if self._gap > _LEAST_GAP else 0.0
                continue
            bound, _, box = heapq.heappop(heap)
            if box.is_stopped:
                again = self._relax(box.low, box.high)
                found = [] if again is None else [again]
            else:
                if self._nodes >= next_dive:
                    together = len(self._members) > 0 and not together
                    self._dive(box, together=together)
                    self._exchange()
                    next_dive, pause = self._nodes + pause, 2 * pause
                found = self._branch(box)
            for child in found:
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
        """Exchange replicas of the best fleet until no better one is found nearby, or a part of the budget is spent."""
        most_s = self._exchange_work_s + _EXCHANGE_SHARE * self._budget.work_s
        while self._best is not None and self._exchange_work_s < most_s and not self._spent():
            better, work_s = improve(self._instance, self._best, self._cost, self._cutoff(), self._cuts)
            self._exchange_work_s += work_s
            if better is None:
                return
            self._accept(better)

    def _cutoff(self) -> float:
        """A box whose bound reaches this holds no better fleet than the best one."""
        if math.isinf(self._cost):
            return math.inf
        slack = EXACT * self._cost / 2
        return self._cost - max(self._step - slack, slack)

    def _goal(self) -> float:
        """Bounds of all boxes are raised to this value before any box is branched on."""
        return min(self._cutoff(), self._cost * (1.0 - self._gap))

    def _relax(self, low: FloatArray, high: FloatArray, *, goal: bool = True) -> _Box | None:
        """Relax a box, no further than to the goal, and consider the rounded-up solution as an incumbent.

        Returns:
            None when nothing better is inside.
        """
        if not self._is_open(low, high):
            return None
        self._nodes += 1
        tolerance, raises, num_types = self._tolerance, 0, len(self._price)
        while True:
            opened = low[:num_types] > 0
            step = np.where(opened, 0.0, self._spare / np.maximum(high[:num_types], 1.0))
            envelope = self._price * (1.0 + step)
            constant = float(self._price[opened].sum()) * self._spare
            relaxed = self._relaxation.solve(
                envelope,
                low,
                high,
                cutoff=self._goal() if goal else self._cutoff(),
                constant=constant,
                tolerance=tolerance,
            )
            if self._nodes == 1:
                self._prices = relaxed.prices
            if relaxed.bound >= self._cutoff():
                return None
            if goal and relaxed.bound >= self._goal():
                self._consider(relaxed.needed)
                return _Box(low, high, relaxed, is_stopped=True)
            capacity = self._utilization * high[:num_types]
            missed = relaxed.missing > WHOLE * (1.0 + float(capacity.sum()))
            if missed and raises < _MOST_RAISES and not self._bounded_together(high):
                found = balance(self._load, capacity, tolerance=WHOLE)
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
            if tolerance > EXACT and self._branching(relaxed.usable, low, high) is None:
                tolerance = EXACT  # whole, but not yet proven: solve to the end
                continue
            return _Box(low, high, relaxed)

    def _consider(self, needed: FloatArray) -> None:
        """Round up: the next whole fleet carries whatever the fractional one does."""
        whole = round_up(needed)
        if not (whole > self._most).any():
            self._accept(whole)

    def _accept(self, whole: FloatArray) -> None:
        """Keep a feasible fleet if it is the cheapest so far."""
        cost = float(self._price @ (whole + self._spare * (whole > 0)))
        if cost < self._cost * (1.0 - EXACT):
            self._best, self._cost = whole, cost
            if self._on_progress is not None:
                self._on_progress(Progress(incumbent=cost, bound=None, note=f"branch and bound, box {self._nodes}"))

    def _is_open(self, low: FloatArray, high: FloatArray) -> bool:
        """Whether some counts of the types add up to counts of the families within the bounds."""
        num_types = len(self._price)
        least, most = self._members @ low[:num_types], self._members @ high[:num_types]
        return bool((low <= high).all() and (least <= high[num_types:]).all() and (most >= low[num_types:]).all())

    def _bounded_together(self, high: FloatArray) -> bool:
        """Whether some family may have fewer replicas than its types one by one."""
        num_types = len(self._price)
        return bool((high[num_types:] < self._members @ high[:num_types]).any())

    def _branching(self, usable: FloatArray, low: FloatArray, high: FloatArray) -> int | None:
        """The type or family with the largest fractional part times price; None when the relaxation is exact here.

        Families go first: where one type is bounded, another of its family takes its place.
        """
        num_types = len(self._price)
        nearest = np.round(usable)
        distance = np.abs(usable - nearest)
        score = np.where(distance > WHOLE * np.maximum(1.0, nearest), distance, 0.0)
        together = np.where(score[num_types:] > _FAMILY_FRACTIONAL, score[num_types:], 0.0)
        if together.any():
            return num_types + int((together * np.maximum(self._rent[num_types:], 1e-9)).argmax())
        score, usable, nearest = score[:num_types], usable[:num_types], nearest[:num_types]
        low, high = low[:num_types], high[:num_types]
        if self._spare:
            inside = (low == 0) & (nearest > 0) & (usable < high - WHOLE)
            score = np.where(inside, np.maximum(score, self._spare * (1.0 - usable / np.maximum(high, 1.0))), score)
        if not score.any():
            return None
        return int((score * np.maximum(self._price, 1e-9)).argmax())

    def _branch(self, box: _Box) -> list[_Box]:
        """Split the box in two at the count of a type or a family."""
        usable = box.relaxed.usable
        g = self._branching(usable, box.low, box.high)
        if g is None:  # whole: it is the incumbent or dearer, unless a capacity is met to the last digit
            self._least_whole = min(self._least_whole, box.relaxed.bound)
            return []
        nearest = round(float(usable[g]))
        at = nearest if abs(usable[g] - nearest) <= WHOLE * max(1.0, nearest) else math.floor(usable[g])
        if self._spare and g < len(self._price) and box.low[g] == 0 and at >= 1:
            at = 0  # in use or not: decides about the spares
        down, up = box.high.copy(), box.low.copy()
        down[g], up[g] = at, at + 1
        children = [self._relax(box.low, down)]
        if up[g] <= box.high[g]:
            children.append(self._relax(up, box.high))
        return [child for child in children if child is not None]

    def _dive(self, box: _Box, *, together: bool) -> None:
        """Diving heuristic: fix one type after the other at a whole count, dearest first, and relax again after each.

        Args:
            box: where to begin.
            together: fix the dearer half of the families before the types.
        """
        current: _Box | None = box
        num_types = len(self._price)
        while current is not None and not self._spent():
            usable, low, high = current.relaxed.usable, current.low, current.high
            nearest = np.round(usable)
            distance = np.abs(usable - nearest)
            fractional = (distance > WHOLE * np.maximum(1.0, nearest)) & (low < high)
            dear = fractional & self._dear & (distance > _FAMILY_FRACTIONAL)
            fractional[num_types:] = False
            if together and dear.any():
                fractional = dear
            if not fractional.any():
                return
            g = int(np.where(fractional, self._rent + 1e-9, 0.0).argmax())
            down, up = high.copy(), low.copy()
            down[g], up[g] = math.floor(usable[g]), math.ceil(usable[g])
            choices = [(low, down), (up, high)]
            if nearest[g] > usable[g]:
                choices.reverse()
            current = self._relax(*choices[0], goal=False) or self._relax(*choices[1], goal=False)


def cheapest_fleet(instance: Instance, budget: WorkBudget, on_progress: OnProgress | None = None) -> Fleet | None:
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
    # The search met no whole fleet: whether the largest fleet is feasible decides.
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
