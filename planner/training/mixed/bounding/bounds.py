"""Lower bounds of a step over pools: of all plans of a cell at once, by dynamic programming over the pools.

*Notation.* Stages i = 1 … P in order take t_i seconds a micro-batch, τ the slowest, W = Σ t_i; m micro-batches.

*Bound A.* In 1F1B stage k starts its first backward no sooner than all forwards and the backwards after it have
passed, and ends alike (recurrences of :mod:`~meshplan.planner.training.pipeline.closed_forms`): with
w_k = min(P − k, m − 1) it does m − 1 − w_k rounds between, and for the slowest

    T ≥ W + Σ_{i>k} t_i + (m − 1 − w_k)·τ ≥ 2·W + (m − 1 − P)·τ

because Σ_{i>k} (τ − t_i) ≤ P·τ − W. An equal split of W makes that least: T ≥ (1 + (m − 1)/P)·W.

*Bound B.* Stage k works m rounds after all forwards and before all backwards of the stages before it, so that
T ≥ Σ_{i≤k} t_i + (m − 1)·t_k. With k the last stage that takes θ or longer,

    T ≥ Σ_{t_i ≥ θ} t_i + (m − 1)·θ

*Bound C*. Before the first backward of the slowest stage k are all forwards of the first micro-batch and its backwards
behind k; after its rounds the w_k micro-batches that it ran ahead have their backwards on k, and the last of them those
before k. A forward is at most a share φ of a micro-batch's time, so that w_k backwards take (1 − φ)·w_k·τ or longer,
and with w_k ≤ P − 1

    T ≥ W + (1 − φ)·w_k·τ + (m − 1 − w_k)·τ ≥ W + (m − 1)·τ − φ·(P − 1)·τ

A lacks up to τ − t_i for every stage behind the slowest, B t_i of each: where these are half as long, C lacks less.

*One cell.* For τ in an interval and waiting in one (:class:`.fills.Cells`), A, B, C and every mean of them
are sums over pools of what an option with l layers adds; the least sum over all options with
Σ l = L, one pool with the LM head, is a dynamic program over pools. Each cell's bound is the largest of those
of some means, and of m·τ, and what messages, embedding, the end of a step and its overhead add at least.

"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.mixed.bounding.fills import Cells, Fill, Form, PoolRows, own_messages_s, pool_rows
from meshplan.planner.training.mixed.options import FIRST, PoolOptions
from meshplan.planner.training.mixed.stages import MixedProblem
from meshplan.planner.training.pipeline.closed_forms import FORWARD_SHARE

# Means of A, B and C, by their shares and θ over τ; where stages may be more than micro-batches, the deep ones. Every
# mean is a bound; these leave least open on the questions of this folder's README.
MEANS = ((1.0, 0.0, 0.0, 1.0), (0.5, 0.5, 0.0, 1.0), (0.5, 0.5, 0.0, 0.9), (0.5, 0.5, 0.0, 0.8))
DEEP_MEANS = ((1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 1.0))
# First intervals of τ, each so many times longer than the one before.
FIRST_STEP = 1.15
# Longest τ of the first parts over the shortest; whatever takes longer is one part, which is not looked into.
LONGEST = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a pool does in a decision.

    Args:
        pool: which.
        row: its option.
        layers: that it holds.
    """

    pool: int
    row: int
    layers: int


@dataclass(slots=True, kw_only=True)
class Field:
    """All plans of one S: options of the pools, and what every plan takes.

    Args:
        pools: (pool, options) of those with an option.
        num_layers: L.
        num_microbatches: m.
        always_s: overhead of a step.
    """

    pools: list[tuple[int, PoolRows]]
    num_layers: int
    num_microbatches: int
    embedding_s: float
    always_s: float

    def start(self) -> tuple[Cells, float]:
        """First cells, and the bound of all that is beyond them."""
        least = self.num_layers / sum(float((own.stages / own.layer_s).max()) for _, own in self.pools)
        longest = least * LONGEST
        count = int(np.ceil(np.log(longest / least) / np.log(FIRST_STEP)))
        tau = least * (longest / least) ** (np.arange(count + 1) / count)
        few = float("inf")
        for _, own in self.pools:
            alone = own_messages_s(own, np.ones((len(own.rows), 1)), self.num_microbatches)[:, 0]
            few = min(few, float((alone + own.ending_s[:, 0]).min()))
        cells = Cells.of(tau[:-1], tau[1:], np.full(count, few), np.full(count, np.inf))
        return cells, self.num_microbatches * longest + self.always_s

    def bounds(self, cells: Cells) -> tuple[FloatArray, list[tuple[Choice, ...]]]:
        """Lower bound of each cell, [cells], and a decision that the largest of its forms likes best."""
        m = self.num_microbatches
        least = m * cells.begin_s
        deepest = sum(int(own.stages.max()) for _, own in self.pools)
        fills = [Fill.of(own, cells, self.num_layers, m) for _, own in self.pools]
        decisions: list[tuple[Choice, ...]] = [()] * len(cells)
        for a, b, c, threshold in MEANS if deepest < m else DEEP_MEANS:
            sums, back = self._sums(fills, self.form(a, b, c, threshold))
            bound = sums + self.constant_s(a, b, c, threshold, cells)
            for cell in np.flatnonzero(np.isfinite(sums) & ((bound > least) | (a == 1.0))).tolist():
                decisions[cell] = self._decision(cell, back)
            least = np.maximum(least, bound)
        return least + cells.least_waiting_s + self.always_s, decisions

    def form(self, a: float, b: float, c: float, threshold: float) -> Form:
        """The mean of A, B at a threshold, and C with these shares: what depends on the decision."""
        return Form(work=2.0 * a + c, stages=a + FORWARD_SHARE * c, long=b, threshold=threshold)

    def constant_s(self, a: float, b: float, c: float, threshold: float, cells: Cells) -> FloatArray:
        """What does not depend on it, [cells]."""
        rounds = (self.num_microbatches - 1) * (a + b * threshold + c) + FORWARD_SHARE * c
        return np.asarray(rounds * cells.begin_s + (2.0 * a + c) * self.embedding_s)

    def _sums(self, fills: Sequence[Fill], form: Form) -> tuple[FloatArray, list[Step]]:
        """Least sum over pools of all layers, [cells], and how it came about."""
        shape = (2, len(fills[0].cells), self.num_layers + 1)
        total = np.full(shape, np.inf)
        total[0, :, 0] = 0.0
        steps = []
        for one in fills:
            least, row = one.least(form)
            plain, taken = convolved(total[0], least[0])
            before, taken_before = convolved(total[1], least[0])
            here, taken_here = convolved(total[0], least[1])
            has = here < before
            total = np.stack([plain, np.where(has, here, before)])
            steps.append(Step(row=row, taken=np.stack([taken, np.where(has, taken_here, taken_before)]), head=has))
        return total[1, :, -1], steps

    def _decision(self, cell: int, steps: Sequence[Step]) -> tuple[Choice, ...]:
        """The options and layers of the least sum of one cell."""
        left, with_head, found = self.num_layers, True, []
        for (pool, own), step in zip(reversed(self.pools), reversed(steps), strict=True):
            here = with_head and bool(step.head[cell, left])
            layers = int(step.taken[int(with_head), cell, left])
            if layers:
                row = int(step.row[int(here), cell, layers])
                found.append(Choice(pool=pool, row=int(own.rows[row]), layers=layers))
            left, with_head = left - layers, with_head and not here
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pool of the dynamic program.

    Args:
        row: option of so many layers, without and with the head [2, cells, L + 1].
        taken: layers of this pool where so many are held by it and those before, by whether they have the head.
        head: where they have it, whether this pool has [cells, L + 1].
    """

    row: IntArray
    taken: IntArray
    head: FloatArray


def field_of(
    problem: MixedProblem,
    options: Sequence[PoolOptions | None],
    pools: Sequence[int],
    sequences: int,
    *,
    overhead_s: float,
) -> Field | None:
    """The plans of one S over some pools; of several pools, those that use at least two of them.

    Args:
        problem: the question.
        options: of each pool.
        pools: that may take part.
        sequences: S.
        overhead_s: least fixed overhead of a step.
    """
    made = [(pool, pool_rows(problem, options[pool], pool, pools, sequences)) for pool in pools]
    rows = [(pool, own) for pool, own in made if own is not None]
    if not rows:
        return None
    layers = problem.any.shape.num_hidden_layers
    embedding, rounds = np.inf, 1
    for pool, own in rows:
        given = options[pool]
        if given is not None:
            embedding = min(embedding, float(given.ends_s[FIRST, own.rows].min()))
            rounds = int(given.num_microbatches[own.rows[0]])
    return Field(
        pools=rows,
        num_layers=layers,
        num_microbatches=rounds,
        embedding_s=max(embedding, 0.0),
        always_s=overhead_s,
    )


def convolved(first: FloatArray, second: FloatArray) -> tuple[FloatArray, IntArray]:
    """The least over x of first[y − x] + second[x], and the x of it, [cells, L + 1] each."""
    sums = _sums_of(first, second)
    at = sums.argmin(axis=2)
    least = np.take_along_axis(sums, at[:, :, None], axis=2)[:, :, 0]
    return least, first.shape[1] - 1 - at


def least_convolved(first: FloatArray, second: FloatArray) -> FloatArray:
    """The least over x of first[y − x] + second[x], [cells, L + 1]."""
    return np.asarray(_sums_of(first, second).min(axis=2))


def _sums_of(first: FloatArray, second: FloatArray) -> FloatArray:
    """first[y − x] + second[x], [cells, y, L − x]; ∞ where y < x."""
    count, length = first.shape
    padded = np.full((count, 2 * length - 1), np.inf)
    padded[:, length - 1 :] = first
    near, far = padded.strides
    windows = np.ndarray((count, length, length), padded.dtype, padded, strides=(near, far, far))
    return np.asarray(windows + second[:, None, ::-1])
