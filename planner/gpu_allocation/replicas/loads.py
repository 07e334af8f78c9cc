"""The polytope of loads: all vectors of busy replicas that some routing produces, and its cheapest point by price.

Notation
    g, b        GPU type, bucket (buckets without traffic are left out)
    load_gb     replicas of type g that all traffic of bucket b keeps busy: rate_b / max_rate_gb, ∞ where the SLO fails
    x_gb        share of bucket b that goes to type g, Σ_g x_gb = 1
    ℓ(x)_g      Σ_b x_gb · load_gb, the load of type g in busy replicas

The loads ℓ(x) form a polytope in as many dimensions as there are *types*, however many buckets there are. For prices
w ≥ 0 of a busy replica its cheapest point sends each bucket whole to one type:

    L(w) = min_x w · ℓ(x) = Σ_b min_g w_g · load_gb

which costs one pass over the matrix: the oracle of the column generation. L(w) is also a proof: *every* w ≥ 0 gives a
valid inequality Σ_g w_g · usable_g ≥ L(w) for the usable replicas of any feasible fleet.

The buckets are partitioned into groups, each with its polytope (the whole is their sum): many small polytopes are
described by far fewer corners than one large one. Buckets with the same two cheapest types share a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

# Price below which a type would look free; keeps 0 · ∞ out of the products. Any non-negative price is a valid proof.
_SMALLEST_RELATIVE_PRICE = 1e-12
# Few groups converge slowly, many make the linear programs wide; 8 and 16 were the best of 1 … 64 on the benchmark.
_GROUPS_SMALL, _GROUPS_LARGE = 8, 16
_LARGE = 5_000  # entries of the load matrix


@dataclass(frozen=True, slots=True)
class Corner:
    """One corner of each group's polytope: the cheapest at given prices.

    Args:
        loads: [groups, types] busy replicas.
        costs: [groups] price · load; they sum to L(w).
        types: [buckets, in the order of ``LoadPolytope.order``] the type to which each bucket is routed.
    """

    loads: FloatArray
    costs: FloatArray
    types: IntArray


class LoadPolytope:
    """The polytope, with an oracle: prices → cheapest corner.

    Args:
        load: [types, buckets] busy replicas for all traffic of a bucket; ∞ where the type cannot serve it. Every
            bucket has a type that can.
        price: [types] used only to group the buckets.
    """

    def __init__(self, load: FloatArray, price: FloatArray) -> None:
        num_types, num_buckets = load.shape
        wanted = _GROUPS_SMALL if load.size <= _LARGE else _GROUPS_LARGE
        self.order, group = _group_buckets(load, price, min(wanted, num_buckets))
        self.num_types, self.num_groups = num_types, int(group[-1]) + 1
        self.starts: IntArray = np.searchsorted(group, np.arange(self.num_groups + 1))
        self._load_by_bucket: FloatArray = np.ascontiguousarray(load.T[self.order])
        self._rows = np.arange(num_buckets)
        self._cell = group * num_types

    @property
    def size(self) -> int:
        """Entries of the load matrix: the work of one question."""
        return int(self._load_by_bucket.size)

    def cheapest(self, price: FloatArray) -> Corner:
        """The corner with the least price · load; ``price`` must not be all zero."""
        price = floored(price)
        types = (self._load_by_bucket * price).argmin(axis=1)
        busy = self._load_by_bucket[self._rows, types]
        flat = np.bincount(self._cell + types, weights=busy, minlength=self.num_groups * self.num_types)
        loads = flat.astype(np.float64).reshape(self.num_groups, self.num_types)
        return Corner(loads, loads @ price, types)


def floored(price: FloatArray) -> FloatArray:
    """``price`` without zeros and negatives, so that unservable buckets stay unaffordable."""
    return np.maximum(price, _SMALLEST_RELATIVE_PRICE * float(price.max()))


def _group_buckets(load: FloatArray, price: FloatArray, num_groups: int) -> tuple[IntArray, IntArray]:
    """Order the buckets by cheapest type, then by how much dearer the second is; split into groups of equal cost."""
    cost = price[:, None] * load
    ranked = np.sort(cost, axis=0)
    best = ranked[0]
    second = ranked[1] if len(price) > 1 else best
    margin = np.divide(second, best, out=np.ones_like(best), where=best > 0)
    order = np.lexsort((margin, cost.argmin(axis=0)))
    weight = np.maximum(best[order], _SMALLEST_RELATIVE_PRICE * max(float(best.max()), 1e-300))
    middle = np.cumsum(weight) - weight / 2
    slot = np.minimum((middle / weight.sum() * num_groups).astype(np.int64), num_groups - 1)
    return order, np.unique(slot, return_inverse=True)[1].astype(np.int64)
