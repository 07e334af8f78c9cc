"""The linear relaxation over a load polytope, by column generation, with bounds that need no trust in the LP solver.

Two programs over the corners k of each group's polytope (λ ≥ 0, Σ_k λ_k = 1 in each group):

*cheapest fleet*  min Σ_g slope_g · m_g + penalty_g · e_g  with  utilization_g · m_g + e_g ≥ Σ_k λ_k ℓ_kg,
                                                           low ≤ m ≤ high, e ≥ 0,
                                                           low_f ≤ Σ_{g in f} m_g ≤ high_f for each family f
*best balance*    min t                                    with  t · capacity_g ≥ Σ_k λ_k ℓ_kg

The duals w of the capacity rows are prices of a busy replica. They name the next corner (the cheapest at w) and, by
weak duality and for *any* w ≥ 0, the bounds

    cheapest fleet ≥ L(w) + Σ_g min over low ≤ m ≤ high of (slope_g − utilization_g · w_g − v_f(g)) · m
                          + Σ_f min over low_f ≤ s ≤ high_f of v_f · s          for any v, here the families' duals
    best balance   ≥ L(w) / Σ_g w_g · capacity_g

computed here in plain sums, so a wrong LP answer could cost time, never a wrong proof. (Dantzig–Wolfe decomposition:
Dantzig & Wolfe, Operations Research 8(1), 1960; the Lagrangian bound: Geoffrion, Math. Programming Study 2, 1974.)
GLOP solves the programs: a row per type and group, whatever the number of buckets. They are linear, grow by columns
and go on from the last basis, so they live in the solver and are no :class:`~meshplan.planner.core.milp.Program`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.milp import new_solver
from meshplan.planner.gpu_allocation.replicas.loads import Corner, LoadPolytope, floored

# Relative distance at which a relaxation counts as solved to the end.
EXACT = 1e-9
# Numbers this close (relative, absolute below 1) to a whole count are one, and loads this much above a capacity fit it:
# ten times finer than what the plain program's solvers let pass.
WHOLE = 1e-7
# A corner's reduced cost must be below minus this, relative to its group's dual, to become a column.
_IMPROVES = 1e-12
# Weights of a corner below this are rounding of the LP solver.
_NOISE = 1e-9
# GLOP gives up on a few of these programs (status ABNORMAL) under one set of parameters and solves them under another.
# An imprecise optimum is welcome: bounds and incumbents are recomputed from it in plain sums.
_GLOP_PARAMETERS = (
    "",
    "use_preprocessing: false",
    "use_dual_simplex: true",
    "use_preprocessing: false use_scaling: false change_status_to_imprecise: false",
)
# Estimated seconds of an LP of given shape, fitted on this solver's own runs; counts work without asking a clock.
_LP_S, _LP_S_PER_ENTRY, _CORNER_S_PER_ENTRY = 3e-4, 6e-8, 4e-9
# The programs start anew from the most useful corners when they have grown to this many.
_MOST_COLUMNS, _KEPT_COLUMNS = 1_000, 300


class _Columns:
    """The part that both programs share: capacity rows, a convexity row per group, and the corners found so far."""

    def __init__(self, polytope: LoadPolytope) -> None:
        self.polytope = polytope
        self.work_s = 0.0
        self._known: list[set[bytes]] = [set() for _ in range(polytope.num_groups)]
        self._corners: list[tuple[int, FloatArray, IntArray]] = []
        self._clear()

    def _clear(self) -> None:
        self.solver: Any = new_solver("GLOP")
        infinity = self.infinity = self.solver.infinity()
        self.rows = [self.solver.Constraint(0.0, infinity) for _ in range(self.polytope.num_types)]
        self.convexity = [self.solver.Constraint(1.0, 1.0) for _ in range(self.polytope.num_groups)]
        self._weights: list[Any] = []

    @property
    def num_columns(self) -> int:
        """Corners in the program."""
        return len(self._corners)

    def add(self, corner: Corner, group: int) -> bool:
        """Make the corner of one group a column; False when it is one already."""
        loads = corner.loads[group]
        key = loads.tobytes()
        if key in self._known[group]:
            return False
        self._known[group].add(key)
        span = slice(self.polytope.starts[group], self.polytope.starts[group + 1])
        self._corners.append((group, loads, corner.types[span]))
        self._add_variable(group, loads)
        return True

    def _add_variable(self, group: int, loads: FloatArray) -> None:
        variable = self.solver.NumVar(0.0, self.infinity, "")
        self.convexity[group].SetCoefficient(variable, 1.0)
        for g in np.flatnonzero(loads).tolist():
            self.rows[g].SetCoefficient(variable, -float(loads[g]))
        self._weights.append(variable)

    def add_improving(self, corner: Corner) -> bool:
        """Add the corners that undercut their group's dual; False when none is new."""
        added = False
        duals = [row.dual_value() for row in self.convexity]  # all of them before the model changes
        for group, (cost, dual) in enumerate(zip(corner.costs, duals, strict=True)):
            if cost < dual - _IMPROVES * abs(dual):
                added |= self.add(corner, group)
        return added

    def forget(self, price: FloatArray) -> None:
        """Start a new program from the corners that are worth most at ``price``, at least one of each group."""
        loads = np.array([corner[1] for corner in self._corners])
        groups = np.array([corner[0] for corner in self._corners])
        cost = loads @ floored(price)
        least = np.full(self.polytope.num_groups, np.inf)
        np.minimum.at(least, groups, cost)
        keep = np.argsort(cost - least[groups], kind="stable")[:_KEPT_COLUMNS]
        kept = [self._corners[k] for k in np.sort(keep)]
        self._known = [set() for _ in range(self.polytope.num_groups)]
        self._corners = kept
        self._clear()
        for group, corner_loads, _ in kept:
            self._known[group].add(corner_loads.tobytes())
            self._add_variable(group, corner_loads)

    def solve(self) -> float:
        """Solve the program over the present columns; its objective value."""
        for parameters in _GLOP_PARAMETERS:
            self.solver.SetSolverSpecificParametersAsString(parameters)
            status = self.solver.Solve()
            if status == self.solver.OPTIMAL:
                break
        entries = (self.polytope.num_types + self.polytope.num_groups) * self.num_columns
        self.work_s += _LP_S + _LP_S_PER_ENTRY * entries + _CORNER_S_PER_ENTRY * self.polytope.size
        if status != self.solver.OPTIMAL:
            raise SolverError(
                f"GLOP stopped with status {status} on a relaxation that always has a solution; the loads span "
                "too many orders of magnitude: check max_request_rate_per_s for extreme values"
            )
        return float(self.solver.Objective().Value())

    def prices(self) -> FloatArray:
        """Duals of the capacity rows: what a busy replica of each type is worth."""
        return np.maximum([row.dual_value() for row in self.rows], 0.0)

    def loads(self) -> FloatArray:
        """[types] busy replicas of the last solution, with the weights of every group made to sum to 1."""
        weights = np.array([variable.solution_value() for variable in self._weights])
        weights[weights < _NOISE] = 0.0
        groups = [corner[0] for corner in self._corners]
        weights /= np.bincount(groups, weights=weights, minlength=self.polytope.num_groups)[groups]
        used = np.flatnonzero(weights)
        total: FloatArray = weights[used] @ np.array([self._corners[k][1] for k in used.tolist()])
        return total

    def routing(self) -> FloatArray:
        """[types, buckets] shares of the last solution; each bucket's sum to 1."""
        polytope = self.polytope
        ordered = np.zeros((polytope.num_types, len(polytope.order)))
        for variable, (group, _, types) in zip(self._weights, self._corners, strict=True):
            value = variable.solution_value()
            if value > _NOISE:
                ordered[types, np.arange(polytope.starts[group], polytope.starts[group + 1])] += value
        shares = np.empty_like(ordered)
        shares[:, polytope.order] = ordered / ordered.sum(axis=0)
        return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """Solution of the relaxation of one box of fleets.

    Args:
        usable: [types + families] usable replicas, fractional.
        needed: [types] usable replicas that a routing found on the way needs, recomputed from the routing.
        bound: no fleet in the box is cheaper, USD/h.
        missing: busy replicas beyond the capacities of the box; above 0 when it may hold no feasible fleet.
        prices: [types] USD/h of one more busy replica.
    """

    usable: FloatArray
    needed: FloatArray
    bound: float
    missing: float
    prices: FloatArray


class FleetRelaxation:
    """Cheapest fractional fleet within bounds on the usable replicas; keeps its corners from one box to the next.

    Args:
        polytope: the loads.
        utilization: [types] load that one usable replica may carry.
        members: [families, types] 1 where a type belongs to a family, whose replicas are bounded together; else 0.
        penalty_usd_per_hour: [types] price of a missing busy replica, far above any real one.
        on_cut: called with every valid inequality found: cut · m ≥ 1.
    """

    def __init__(
        self,
        polytope: LoadPolytope,
        utilization: FloatArray,
        members: FloatArray,
        penalty_usd_per_hour: FloatArray,
        on_cut: Callable[[FloatArray], None],
    ) -> None:
        self._columns = _Columns(polytope)
        self._on_cut, self._members = on_cut, members
        self._polytope, self._utilization, self._penalty = polytope, utilization, penalty_usd_per_hour
        self._prices: FloatArray = penalty_usd_per_hour
        self._set_up()

    def _set_up(self) -> None:
        """The columns that are not corners: usable replicas of types and of families, and replicas that are missing."""
        solver = self._columns.solver
        num_types, num_families = len(self._columns.rows), len(self._members)
        self._usable = [solver.NumVar(0.0, self._columns.infinity, "") for _ in range(num_types + num_families)]
        self._missing = [solver.NumVar(0.0, self._columns.infinity, "") for _ in self._columns.rows]
        for g, row in enumerate(self._columns.rows):
            row.SetCoefficient(self._usable[g], float(self._utilization[g]))
            row.SetCoefficient(self._missing[g], 1.0)
        self._sums = [solver.Constraint(0.0, 0.0) for _ in self._members]
        for f, row in enumerate(self._sums):
            row.SetCoefficient(self._usable[num_types + f], 1.0)
            for g in np.flatnonzero(self._members[f]).tolist():
                row.SetCoefficient(self._usable[g], -1.0)
        self.raise_penalty(1.0)

    @property
    def work_s(self) -> float:
        """Estimated processor seconds spent so far: the same on every run."""
        return self._columns.work_s

    def start_from(self, corner: Corner) -> None:
        """Give every group its first column."""
        for group in range(self._polytope.num_groups):
            self._columns.add(corner, group)

    def raise_penalty(self, factor: float) -> None:
        """Raise the price of missing replicas."""
        self._penalty = self._penalty * factor
        for variable, penalty in zip(self._missing, self._penalty, strict=True):
            self._columns.solver.Objective().SetCoefficient(variable, float(penalty))

    def solve(
        self, slope: FloatArray, low: FloatArray, high: FloatArray, *, cutoff: float, constant: float, tolerance: float
    ) -> Relaxed:
        """Relax one box.

        Args:
            slope: [types] USD/h of a usable replica.
            low: [types + families] least usable replicas.
            high: [types + families] most.
            cutoff: stop as soon as the bound reaches this, USD/h.
            constant: added to the objective, USD/h.
            tolerance: stop when objective and bound are relatively this close.
        """
        if self._columns.num_columns > _MOST_COLUMNS:
            self._columns.forget(self._prices)
            self._set_up()
        objective_terms = self._columns.solver.Objective()
        for variable, least, most in zip(self._usable, low.tolist(), high.tolist(), strict=True):
            variable.SetBounds(least, most)
        for variable, usd in zip(self._usable, slope.tolist(), strict=False):  # a family's are paid by type
            objective_terms.SetCoefficient(variable, usd)
        best = constant + float(slope @ low[: len(slope)])  # what w = 0 proves
        while True:
            objective = self._columns.solve() + constant
            prices = self._columns.prices()
            worth = np.array([row.dual_value() for row in self._sums])  # −v: the rows read s − Σ m = 0
            if float(prices.max()) <= 0.0:  # the least counts already suffice
                best = max(best, constant + self._least_rent(slope, worth, low, high))
                break
            corner = self._polytope.cheapest(prices)
            prices = floored(prices)
            least = float(corner.costs.sum())
            self._on_cut(self._utilization * prices / least)
            rent = self._least_rent(slope - self._utilization * prices, worth, low, high)
            best = max(best, constant + least + rent)
            close = objective - best <= tolerance * max(abs(objective), 1e-300)
            if best >= cutoff or close or not self._columns.add_improving(corner):
                break
        usable = np.array([variable.solution_value() for variable in self._usable])
        self._prices = prices
        missing = sum(variable.solution_value() for variable in self._missing)
        needed = self._columns.loads() / self._utilization
        return Relaxed(usable=usable, needed=needed, bound=best, missing=missing, prices=prices)

    def _least_rent(self, slope: FloatArray, worth: FloatArray, low: FloatArray, high: FloatArray) -> float:
        """Least slope · m − worth · (s − S m) over low ≤ (m, s) ≤ high, where S sums the families' types."""
        slopes = np.concatenate([slope + worth @ self._members, -worth])
        return float(np.minimum(slopes * low, slopes * high).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The routing with the lowest peak utilisation, for given capacities.

    Args:
        peak: highest load / capacity of any type; above 1 the capacities do not suffice.
        bound: no routing has a lower peak.
        shares: [types, buckets].
        prices: [types] proof of the bound: Σ prices · capacity · bound = least.
        least: L(prices), the least that the load can be worth at these prices.
        work_s: estimated processor seconds.
    """

    peak: float
    bound: float
    shares: FloatArray
    prices: FloatArray
    least: float
    work_s: float


def balance(
    load: FloatArray, capacity: FloatArray, *, tolerance: float = EXACT, decide: bool = False
) -> Balance | None:
    """Route so that the fullest type is as empty as possible.

    Args:
        load: [types, buckets] busy replicas, ∞ where a type cannot serve a bucket.
        capacity: [types] busy replicas that fit; types with 0 take no load.
        tolerance: relative distance of peak and bound to stop at.
        decide: stop as soon as it is known whether the capacities suffice (peak at most 1, or bound above 1).

    Returns:
        The routing, or None when some bucket has no type with capacity that can serve it.
    """
    active = np.flatnonzero(capacity > 0)
    num_types, num_buckets = load.shape
    if num_buckets == 0:
        return Balance(
            peak=0.0, bound=0.0, shares=np.zeros(load.shape), prices=np.zeros(num_types), least=0.0, work_s=0.0
        )
    if not active.size or not np.isfinite(load[active]).any(axis=0).all():
        return None
    fits = capacity[active]
    polytope = LoadPolytope(load[active], 1.0 / fits)
    columns = _Columns(polytope)
    peak = columns.solver.NumVar(0.0, columns.infinity, "")
    columns.solver.Objective().SetCoefficient(peak, 1.0)
    for row, room in zip(columns.rows, fits, strict=True):
        row.SetCoefficient(peak, float(room))
    prices = 1.0 / fits
    corner = polytope.cheapest(prices)
    for group in range(polytope.num_groups):
        columns.add(corner, group)
    best, best_prices, least = 0.0, prices, 0.0
    while True:
        objective = columns.solve()
        prices = floored(columns.prices())
        corner = polytope.cheapest(prices)
        bound = float(corner.costs.sum() / (prices @ fits))
        if bound > best:
            best, best_prices, least = bound, prices, float(corner.costs.sum())
        decided = decide and (objective <= 1.0 or best > 1.0 + WHOLE)
        if decided or objective - best <= tolerance * objective or not columns.add_improving(corner):
            break
    shares = np.zeros(load.shape)
    shares[active] = columns.routing()
    # A type without capacity gets the least price at which it would take no bucket: the proof holds for fleets with it.
    worth = (best_prices[:, None] * load[active]).min(axis=0)
    all_prices = np.where(np.isfinite(load), worth / load, 0.0).max(axis=1)
    all_prices[active] = best_prices
    used = np.where(shares > 0, shares * np.where(np.isfinite(load), load, 0.0), 0.0).sum(axis=1)[active]
    return Balance(
        peak=float((used / fits).max()),
        bound=best,
        shares=shares,
        prices=all_prices,
        least=least,
        work_s=columns.work_s,
    )
