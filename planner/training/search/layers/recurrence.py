"""The slowest stage's least time over all splits of the layers: a dynamic programme over the stages.

D_i(j) = min_{k≤j} max(D_{i−1}(k), m·t_i(k, j) + φ/v·Σ_{h<i} t_h) with the notation of :mod:`.uneven`, exact, for many
candidates at once; O(p·L·n) for stages of at most n layers: a stage that takes longer than the best step by itself is
out.

*By the slowest stage* (:meth:`Recurrence.least_s`). In (interleaved) 1F1B stage i runs w_i of its m·v passes ahead,
each of which waits for the slowest stage up to it, X (:mod:`~meshplan.planner.training.pipeline.closed_forms`):

    T ≥ m·t_i + (w_i/v)·(X − t_i) + 1/v·Σ_{h<i} t_h

A dynamic programme with the stages that come after one of X or longer as a state of their own bounds all splits whose
slowest stage takes X or longer. It grows with every t, so that it holds for longer stages than the t that are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.pipeline.idle import least_idle_s
from meshplan.planner.training.search.layers.least_recompute import stage_recompute_s
from meshplan.planner.training.search.layers.stage_costs import SplitCosts, StageCosts, StageTable

# Schedules in which a micro-batch fills the pipeline before a stage and drains it after.
FILLING = frozenset({"gpipe", "1f1b", "interleaved"})
# Schedules whose stages run a known number of passes ahead.
AHEAD = frozenset({"1f1b", "interleaved"})


def longest_stage(costs: StageCosts, fewest: Sequence[int], most_s: FloatArray, chunks: int) -> int:
    """Most layers that a stage can hold.

    Args:
        costs: of the stages.
        fewest: layers of each stage at least, [p].
        most_s: a stage takes no longer for a micro-batch, [n].
        chunks: v.
    """
    least = np.maximum(costs.layer_s.min(axis=0), 1e-12)
    count = np.floor(np.where(np.isfinite(most_s), most_s / least, np.inf) * (1.0 + 1e-9)).max(initial=0.0)
    return int(min(max(count, 0), len(costs.kind_of) - sum(fewest) + chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A number of layers on a stage, after each number of layers on those before it.

    Args:
        count: layers of the stage.
        begin: layers before it.
        end: the same with its own.
        seconds: of a micro-batch on it, [., n]; infinite where it cannot hold them.
        passed_s: until the first micro-batch arrives and after the last one leaves, [., n].
        idle_s: what it waits for the stages after it, [., n].
    """

    count: int
    begin: slice
    end: slice
    seconds: FloatArray
    passed_s: FloatArray
    idle_s: FloatArray | float


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """The dynamic programme of one batch of candidates.

    Args:
        stages: the batch and its split.
        costs: of the stages.
        tables: by the ends that a stage has; none where a stage gathers its own parameters.
        fewest: fewest layers of each stage, [p].
        longest: most layers of a stage.
        memory_bytes: usable on a device.
    """

    stages: SplitCosts
    costs: StageCosts
    tables: Mapping[tuple[bool, bool], StageTable]
    fewest: Sequence[int]
    longest: int
    memory_bytes: float

    @cached_property
    def _before(self) -> IntArray:
        """Layers of each kind before each one, [kinds, L + 1]."""
        return self.costs.layers_before()

    @cached_property
    def _until_s(self) -> FloatArray:
        """What the layers before each one take, [L + 1, n]."""
        return np.asarray(self._before.T @ self.costs.layer_s)

    def solve(self, most_exposed_s: FloatArray | None = None) -> tuple[FloatArray, IntArray, IntArray]:
        """D_p(L), [n], and the layers of each stage that attain it, fewest and most, [p, n].

        Args:
            most_exposed_s: gradient reduction that a stage may expose, [n]; None: any.
        """
        batch, costs = self.stages.batch, self.costs
        best = np.full((len(costs.kind_of) + 1, len(batch)), np.inf)
        best[0] = 0.0
        early, late = [], []
        for stage in range(self.stages.split.pipeline_parallel):
            best, few, many = self._place(stage, best, most_exposed_s)
            early.append(few)
            late.append(many)
        return best[-1], self._cuts(early), self._cuts(late)

    def least_s(self, edges_s: FloatArray) -> FloatArray:
        """D_p(L) by the slowest stage, [n]: the least over all ranges in which its time may be.

        Args:
            edges_s: where ranges begin and end, ascending from 0 to infinity, [ranges + 1, n].
        """
        m, stages = self.stages.batch.num_microbatches, self.stages.split.pipeline_parallel
        slowest_s, below_s = edges_s[:-1, None], edges_s[1:, None]
        before = np.full((len(slowest_s), len(self.costs.kind_of) + 1, len(m)), np.inf)
        before[:, 0] = 0.0
        after = np.full_like(before, np.inf)
        for stage in range(stages):
            ahead = self._passes_ahead(stage)
            before_then, after_then = np.full_like(before, np.inf), np.full_like(before, np.inf)
            for one in self._moves(stage, None):
                own_s = np.where(one.seconds < below_s, m * one.seconds + one.passed_s, np.inf)
                is_slow = one.seconds >= slowest_s
                first = np.maximum(before[:, one.begin], own_s + one.idle_s)
                waits_s = np.maximum(one.idle_s, ahead * np.maximum(slowest_s - one.seconds, 0.0))
                again = np.maximum(after[:, one.begin], own_s + waits_s)
                reached = np.minimum(again, np.where(is_slow, first, np.inf))
                after_then[:, one.end] = np.minimum(after_then[:, one.end], reached)
                before_then[:, one.end] = np.minimum(before_then[:, one.end], np.where(is_slow, np.inf, first))
            before, after = before_then, after_then
        return np.asarray(after[:, -1].min(axis=0))

    def _passes_ahead(self, stage: int) -> FloatArray:
        """w/v of a stage, [n]; 0 for schedules of which it is not known."""
        split, m = self.stages.split, self.stages.batch.num_microbatches
        p = split.pipeline_parallel
        if split.schedule not in AHEAD:
            return np.zeros(len(m))
        ahead = []
        for v in {split.virtual_pipeline_stages, self.stages.most_chunks}:  # between them w/v rises or falls
            passes = p - 1 - stage if v == 1 else 2 * (p - 1 - stage) + (v - 1) * p
            ahead.append(np.minimum(passes, m * v - 1) / v)
        return np.minimum.reduce(ahead)

    def _place(
        self, stage: int, best: FloatArray, most_exposed_s: FloatArray | None
    ) -> tuple[FloatArray, IntArray, IntArray]:
        """One stage of the recurrence: D_i, and the layers of this stage that attain it, fewest and most."""
        result = np.full_like(best, np.inf)
        few, many = np.zeros(best.shape, dtype=np.int16), np.zeros(best.shape, dtype=np.int16)
        for one in self._moves(stage, most_exposed_s):
            busy_s = self.stages.batch.num_microbatches * one.seconds + one.passed_s + one.idle_s
            reached, own = np.maximum(best[one.begin], busy_s), result[one.end]
            np.copyto(few[one.end], one.count, where=reached < own)
            np.copyto(many[one.end], one.count, where=reached <= own)
            np.minimum(own, reached, out=own)
        return result, few, many

    def _moves(self, stage: int, most_exposed_s: FloatArray | None) -> Iterator[_Move]:
        """What a stage takes with each number of layers.

        Only the layers that the stages before and after it can hold at all are looked at: from ``lowest`` to
        ``highest`` lie on the stages up to this one.
        """
        split, costs, longest = self.stages.split, self.costs, self.longest
        before, until, layers = self._before, self._until_s, len(costs.kind_of)
        after = split.pipeline_parallel - 1 - stage
        fill = (1.0 if split.schedule in FILLING else 0.0) / self.stages.most_chunks
        passed = fill * (until + costs.base_s[:stage].sum(axis=0)) if stage else np.zeros_like(until)
        left = until[-1] - until + costs.base_s[stage + 1 :].sum(axis=0)
        lowest, highest = max(layers - after * longest, 0), min((stage + 1) * longest, layers)
        earlier = max(layers - (after + 1) * longest, 0), min(stage * longest, layers)
        moves = []
        for count in range(max(self.fewest[stage], lowest - earlier[1]), min(longest, highest - earlier[0]) + 1):
            begin = slice(max(earlier[0], lowest - count), min(earlier[1], highest - count) + 1)
            if begin.start < begin.stop:
                moves.append((count, begin, slice(begin.start + count, begin.stop + count)))
        again_s = self._recompute_s(stage, [before[:, end] - before[:, begin] for _, begin, end in moves])
        for (count, begin, end), own_again_s in zip(moves, again_s, strict=True):
            seconds = self._seconds(stage, count, until[end] - until[begin])
            forward = self.stages.model.forward_share * seconds
            if count:
                seconds = seconds + own_again_s
            if most_exposed_s is not None:
                table = self.tables[self.stages.ends(stage)]
                seconds = np.where(table.exposed_s[count - table.fewest] <= most_exposed_s, seconds, np.inf)
            idle: FloatArray | float = 0.0
            if split.schedule == "1f1b":
                idle = least_idle_s(
                    warm_up=after + 1,
                    num_microbatches=self.stages.batch.num_microbatches,
                    forward_s=forward,
                    backward_s=seconds - forward,
                    after_s=left[end],
                )
            yield _Move(count=count, begin=begin, end=end, seconds=seconds, passed_s=passed[begin], idle_s=idle)

    def _seconds(self, stage: int, count: int, layers_s: FloatArray) -> FloatArray:
        """A micro-batch on a stage with ``count`` layers that take ``layers_s`` together, [., n]."""
        if not self.tables:
            return self.costs.base_s[stage] + layers_s
        table = self.tables[self.stages.ends(stage)]
        return np.broadcast_to(table.seconds[count - table.fewest], layers_s.shape)

    def _recompute_s(self, stage: int, counts: Sequence[IntArray]) -> list[FloatArray]:
        """Least time of the recompute that keeps a stage within memory, [., n] each; infinite where none does.

        Args:
            stage: which one.
            counts: layers of each kind that it may hold, [kinds, .] each.
        """
        if not counts:
            return []
        # All at once, and what neighbours share once: they differ only where another kind of layer begins.
        each, costs = np.concatenate(counts, axis=1), self.costs
        first = np.concatenate([[0], 1 + np.flatnonzero((each[:, 1:] != each[:, :-1]).any(axis=0))])
        sets = each[:, first]
        lacking = costs.base_bytes[stage] + sets.T @ costs.layer_bytes[stage] - self.memory_bytes
        if not (lacking > 0.0).any():
            return [np.zeros(1)] * len(counts)
        seconds = stage_recompute_s(
            np.maximum(lacking, 0.0), sets, again_s=costs.again_s, saved_bytes=costs.saved_bytes[stage]
        )
        which = np.repeat(np.arange(len(first)), np.diff(first, append=each.shape[1]))
        rows = np.split(which, np.cumsum([one.shape[1] for one in counts])[:-1])
        return [seconds[own[:1] if own[0] == own[-1] else own] for own in rows]

    def _cuts(self, taken: Sequence[IntArray]) -> IntArray:
        """Layers of each stage, from the last one back, [p, n]."""
        at = np.full(len(self.stages.batch), len(self.costs.kind_of), dtype=np.int64)
        counts = []
        for stage in reversed(taken):
            counts.append(stage[at, np.arange(len(at))])
            at = at - counts[-1]
        return np.stack(counts[::-1])
