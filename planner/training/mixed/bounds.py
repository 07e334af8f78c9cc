"""Lower bounds of a step over pools, for many partial decisions at once.

*Notation.* Each pool k works under an option (or none): a_k seconds of a layer, at most P_k stages. τ is the time of
the slowest stage, m micro-batches, L layers, W = Σ t_i the time of one micro-batch through all stages, P = Σ P_k.

*Bound.* In 1F1B the slowest stage k starts its first backward no sooner than all forwards and the backwards after it
have passed, and ends alike (recurrences of :mod:`~meshplan.planner.training.pipeline.closed_forms`), so that

    T ≥ W + Σ_{i>k} t_i + (m − 1 − w_k)·τ ≥ 2·W + (m − 1 − P)·τ,    T ≥ m·τ

with w_k = min(P − 1 − k, m − 1) and Σ_{i>k}(τ − t_i) ≤ P·τ − W. Its w_k forwards ahead take that long, too, so that
T ≥ Σ_{i≤k} t_i + (m − 1)·τ; the mean of this and the first is T ≥ W + (m − 1 − w/2)·τ with w = min(P − 1, m − 1).
After the last micro-batch, stages need at least L over what all of them end in a second.

Within τ a pool holds at most C_k(τ) = P_k·min(⌊τ/a_k⌋, memory)
layers; W is at least what L layers cost on the pools that take least for a layer, and what the ends add. τ is cut into
intervals: in each, capacities are those of its end, the factor of τ that of its beginning, so that every real τ is
covered. A pool that is not decided yet has, for each τ, the largest capacity and the least a of all of its options.
Beyond the last interval m·τ is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.mixed.options import LAST, MIDDLE, PoolOptions

# Each interval of τ is so much longer than the one before; up to the best plan known, else about three times the least.
STEP, COARSE, MOST_INTERVALS = 1.006, 1.03, 96
# Partial decisions that are bounded at once: what fits the processor's cache.
AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTable:
    """Options of one pool for one S; row 0 is: not used.

    Args:
        rows: index into the pool's options of each row, −1 for row 0; of options that differ in recompute alone, the
            first, and the best of each figure.
        layer_s: a, ∞ in row 0 [rows].
        stages: most stages [rows].
        capacity: layers within the end of each interval [rows, intervals].
        head_loss: layers that the LM head takes the place of on its stage [rows, intervals].
        ends_s: what embedding and LM head add, ∞ in row 0 [2, rows].
        speed: layers of all stages whose ending takes a second [rows].
    """

    rows: IntArray
    layer_s: FloatArray
    stages: FloatArray
    capacity: FloatArray
    head_loss: FloatArray
    ends_s: FloatArray
    speed: FloatArray

    def taking(self, keep: IntArray) -> PoolTable:
        """The rows at ``keep``."""
        return PoolTable(
            rows=self.rows[keep],
            layer_s=self.layer_s[keep],
            stages=self.stages[keep],
            capacity=self.capacity[keep],
            head_loss=self.head_loss[keep],
            ends_s=self.ends_s[:, keep],
            speed=self.speed[keep],
        )

    @property
    def best(self) -> PoolTable:
        """One row that is at least as good as any, in every respect."""
        return PoolTable(
            rows=np.array([-1]),
            layer_s=self.layer_s.min(keepdims=True),
            stages=self.stages.max(keepdims=True),
            capacity=self.capacity.max(axis=0, keepdims=True),
            head_loss=self.head_loss.min(axis=0, keepdims=True),
            ends_s=self.ends_s.min(axis=1, keepdims=True),
            speed=self.speed.max(keepdims=True),
        )


@dataclass(slots=True, kw_only=True)
class Relaxed:
    """Tables of all pools for one S.

    Args:
        pools: one each.
        tau_s: beginnings of the intervals and the end of the last, [intervals + 1].
        num_microbatches: m.
        num_layers: L.
        overhead_s: least fixed overhead of a step.
        left_out: options were left out by :meth:`without`.
    """

    pools: list[PoolTable]
    tau_s: FloatArray
    num_microbatches: int
    num_layers: int
    overhead_s: float
    left_out: bool = False

    def bounds(self, chosen: Sequence[IntArray | None]) -> FloatArray:
        """Lower bound of each partial decision, [n].

        Args:
            chosen: per pool, row of each partial decision, [n]; None where the pool is not decided.
        """
        length = next((len(one) for one in chosen if one is not None), 1)
        best = [pool.best if one is None else pool for pool, one in zip(self.pools, chosen, strict=True)]
        found = []
        for start in range(0, length, AT_ONCE):
            part = slice(start, min(start + AT_ONCE, length))
            rows = [np.zeros(part.stop - start, np.int64) if one is None else one[part] for one in chosen]
            found.append(self._bounds(best, rows))
        return np.concatenate(found)

    def _bounds(self, pools: Sequence[PoolTable], rows: Sequence[IntArray]) -> FloatArray:
        taken = list(zip(pools, rows, strict=True))
        capacity = np.stack([pool.capacity[row] for pool, row in taken])
        loss = np.minimum.reduce([pool.head_loss[row] for pool, row in taken])
        cost = np.stack([pool.layer_s[row] for pool, row in taken])
        ends = np.minimum.reduce([pool.ends_s[:, row] for pool, row in taken]).sum(axis=0)
        stages = np.sum([pool.stages[row] for pool, row in taken], axis=0)
        speed = np.stack([pool.speed[row] for pool, row in taken])
        enough = capacity.sum(axis=0) >= self.num_layers + loss
        work = np.where(enough, _least_work(capacity, cost, self.num_layers) + ends[:, None], np.inf)
        return self._least(work, stages, _least_ending_s(capacity, speed, self.num_layers)) + self.overhead_s

    def _least(self, work: FloatArray, stages: FloatArray, ending: FloatArray) -> FloatArray:
        """Least of the bound over the intervals, [n], of W and of the ending by interval, [n, intervals] each."""
        m, begin, end = self.num_microbatches, self.tau_s[:-1], self.tau_s[1:]
        factor = (m - 1 - stages)[:, None]
        filled = 2.0 * work + factor * np.where(factor >= 0, begin, end)
        ahead = np.minimum(np.maximum(stages - 1, 0), m - 1)[:, None]
        seconds = np.maximum(np.maximum(filled, m * begin), work + (m - 1 - ahead / 2.0) * begin)
        return np.asarray(np.minimum((seconds + ending).min(axis=1), m * self.tau_s[-1]))

    def without(self, ceiling_s: float) -> None:
        """Leave out options that no plan better than ``ceiling_s`` has, whatever the other pools do."""
        for index, pool in enumerate(self.pools):
            chosen: list[IntArray | None] = [None] * len(self.pools)
            chosen[index] = np.arange(len(pool.rows))
            keep = self.bounds(chosen) < ceiling_s
            self.left_out |= not keep.all()
            self.pools[index] = pool.taking(np.flatnonzero(keep | (pool.rows < 0)))


def _least_work(capacity: FloatArray, cost: FloatArray, layers: int) -> FloatArray:
    """Least Σ of layer times, [n, intervals].

    Args:
        capacity: [pools, n, intervals].
        cost: of a layer, [pools, n].
        layers: to hold.
    """
    order = np.argsort(cost, axis=0)
    left = np.full(capacity.shape[1:], float(layers))
    total = np.zeros_like(left)
    columns = np.arange(capacity.shape[1])
    for place in range(len(capacity)):
        pool = order[place]
        taken = np.minimum(capacity[pool, columns], left)
        price = cost[pool, columns]
        total += taken * np.where(np.isfinite(price), price, 0.0)[:, None]
        left = left - taken
    return total


def _least_ending_s(capacity: FloatArray, speed: FloatArray, layers: int) -> FloatArray:
    """Least time E after the last micro-batch, [n, intervals]: the least with Σ_k min(C_k, E·v_k) ≥ L.

    Args:
        capacity: C, [pools, n, intervals].
        speed: v, layers whose ending takes a second, [pools, n].
        layers: L.
    """
    rate = speed[:, :, None]
    full = np.where(rate > 0, capacity / np.maximum(rate, 1e-30), np.inf)  # E from which on a pool is full
    least = np.zeros(capacity.shape[1:])
    for one in range(len(capacity)):
        at = np.where(np.isfinite(full[one]), full[one], 0.0)
        held = np.minimum(capacity, at * rate).sum(axis=0)
        # Where E = at is too little, what is missing comes from the pools that are not full yet.
        open_rate = (rate * (full > at)).sum(axis=0)
        more = np.where(open_rate > 0, (layers - held) / np.maximum(open_rate, 1e-30), 0.0)
        least = np.maximum(least, np.where(held < layers, at + more, 0.0))
    start = layers / np.maximum(speed.sum(axis=0), 1e-30)
    return np.maximum(least, np.where(speed.sum(axis=0) > 0, start, 0.0)[:, None])


def relaxed(
    pools: Sequence[PoolOptions | None],
    sequences: int,
    num_layers: int,
    used: Sequence[int],
    *,
    overhead_s: float,
    ceiling_s: float = float("inf"),
) -> Relaxed | None:
    """Tables of all pools for one S; None where no pool has an option, or none can beat the ceiling.

    Args:
        pools: options of each.
        sequences: S.
        num_layers: L.
        used: pools that may take part.
        overhead_s: least fixed overhead of a step.
        ceiling_s: step of a plan that is known.
    """
    rows = [_rows(options, sequences) if pool in used else _NONE for pool, options in enumerate(pools)]
    some = [(options, row) for options, row in zip(pools, rows, strict=True) if options is not None and len(row)]
    fastest = sum(float((options.most_stages[row] / options.layer_s[row]).max()) for options, row in some)
    if not fastest:
        return None
    m = int(some[0][0].num_microbatches[some[0][1][0]])
    least = num_layers / fastest
    longest = max(ceiling_s / m, least * STEP)
    if not np.isfinite(longest):
        tau = least * COARSE ** np.arange(MOST_INTERVALS // 4 + 1)
    else:
        count = int(np.clip(np.ceil(np.log(longest / least) / np.log(STEP)), 1, MOST_INTERVALS))
        tau = least * (longest / least) ** (np.arange(count + 1) / count)
    return Relaxed(
        pools=[_table(options, row, tau) for options, row in zip(pools, rows, strict=True)],
        tau_s=tau,
        num_microbatches=m,
        num_layers=num_layers,
        overhead_s=overhead_s,
    )


_NONE = np.zeros(0, dtype=np.int64)


def _rows(options: PoolOptions | None, sequences: int) -> IntArray:
    """Options of an S under which a stage of one layer fits."""
    if options is None:
        return _NONE
    fits = options.most_layers(MIDDLE, 1.0, slice(None)) >= 1
    return np.flatnonzero((options.sequences == sequences) & fits)


def _table(options: PoolOptions | None, rows: IntArray, tau: FloatArray) -> PoolTable:
    """The table of one pool's options at ``rows``, and of leaving it out."""
    end = tau[1:] * (1.0 + 1e-12)
    nothing = np.zeros((1, len(end)))
    if options is None or not len(rows):
        return PoolTable(
            rows=np.array([-1]),
            layer_s=np.array([np.inf]),
            stages=np.zeros(1),
            capacity=nothing,
            head_loss=nothing + np.inf,
            ends_s=np.full((2, 1), np.inf),
            speed=np.zeros(1),
        )
    layer, stages = options.layer_s[rows], options.most_stages[rows].astype(float)
    whole = np.floor(end / layer[:, None])
    head = np.maximum(np.floor((end - options.ends_s[LAST, rows][:, None]) / layer[:, None]), 0.0)
    limit = options.most_layers(MIDDLE, 1.0, rows)[:, None]
    capacity = stages[:, None] * np.minimum(whole, limit)
    loss = np.minimum(whole, limit) - np.minimum(head, limit)
    first = np.flatnonzero(np.append(True, options.alike[rows][1:] != options.alike[rows][:-1]))
    least, most = np.minimum.reduceat, np.maximum.reduceat
    return PoolTable(
        rows=np.append(-1, rows[first]),
        layer_s=np.append(np.inf, least(layer, first)),
        stages=np.append(0.0, stages[first]),
        capacity=np.concatenate([nothing, most(capacity, first, axis=0)]),
        head_loss=np.concatenate([nothing + np.inf, least(loss, first, axis=0)]),
        ends_s=np.concatenate([np.full((2, 1), np.inf), least(options.ends_s[1:3, rows], first, axis=1)], axis=1),
        speed=np.append(0.0, most(stages / np.maximum(options.ending_s[rows], 1e-30), first)),
    )
