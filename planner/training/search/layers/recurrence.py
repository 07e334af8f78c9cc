"""The slowest stage's least time over all splits of the layers: a dynamic programme over the stages.

D_i(j) = min_{k≤j} max(D_{i−1}(k), m·t_i(k, j) + φ/v·Σ_{h<i} t_h) with the notation of :mod:`.uneven`, exact, for many
candidates at once; O(p·L·n) for stages of at most n layers: a stage that takes longer than the best step by itself is
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.search.layers.idle import least_idle_s
from meshplan.planner.training.search.layers.stage_costs import SplitCosts, StageCosts, StageTable

# Schedules in which a micro-batch fills the pipeline before a stage and drains it after.
FILLING = frozenset({"gpipe", "1f1b", "interleaved"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The dynamic programme of one batch of candidates.

    Args:
        stages: the batch and its split.
        costs: of the stages.
        tables: by the ends that a stage has; none where a stage gathers its own parameters.
        longest: most layers of a stage.
        memory_bytes: usable on a device.
    """

    stages: SplitCosts
    costs: StageCosts
    tables: Mapping[tuple[bool, bool], StageTable]
    longest: int
    memory_bytes: float

    def solve(self, most_exposed_s: FloatArray | None = None) -> tuple[FloatArray, IntArray, IntArray]:
        """D_p(L), [n], and the layers of each stage that attain it, fewest and most, [p, n].

        Args:
            most_exposed_s: gradient reduction that a stage may expose, [n]; None: any.
        """
        split, batch, costs = self.stages.split, self.stages.batch, self.costs
        until = np.concatenate([np.zeros((1, len(batch))), np.cumsum(costs.layer_s, axis=0)])
        fill = (1.0 if split.schedule in FILLING else 0.0) / split.virtual_pipeline_stages
        best = np.full((len(self.stages.kind_of) + 1, len(batch)), np.inf)
        best[0] = 0.0
        early, late = [], []
        for stage in range(split.pipeline_parallel):
            passed = fill * (until + costs.base_s[:stage].sum(axis=0)) if stage else np.zeros_like(until)
            after = until[-1] - until + costs.base_s[stage + 1 :].sum(axis=0)
            best, few, many = self._place(stage, best, (passed, after), until, most_exposed_s)
            early.append(few)
            late.append(many)
        return best[-1], self._cuts(early), self._cuts(late)

    def _place(
        self,
        stage: int,
        best: FloatArray,
        others: tuple[FloatArray, FloatArray],
        until: FloatArray,
        most_exposed_s: FloatArray | None,
    ) -> tuple[FloatArray, IntArray, IntArray]:
        """One stage of the recurrence: D_i, and the layers of this stage that attain it, fewest and most.

        Only the layers that the stages before and after it can hold at all are looked at: from ``lowest`` to
        ``highest`` lie on the stages up to this one.
        """
        split, longest = self.stages.split, self.longest
        layers, after = len(best) - 1, split.pipeline_parallel - 1 - stage
        lowest, highest = max(layers - after * longest, 0), min((stage + 1) * longest, layers)
        earlier = max(layers - (after + 1) * longest, 0), min(stage * longest, layers)
        result = np.full_like(best, np.inf)
        few, many = np.zeros(best.shape, dtype=np.int16), np.zeros(best.shape, dtype=np.int16)
        for count in range(
            max(self.stages.fewest_layers(stage), lowest - earlier[1]), min(longest, highest - earlier[0]) + 1
        ):
            begin = slice(max(earlier[0], lowest - count), min(earlier[1], highest - count) + 1)
            if begin.start >= begin.stop:
                continue
            end = slice(begin.start + count, begin.stop + count)
            seconds = self._seconds(stage, count, until[end] - until[begin])
            forward = self.stages.model.forward_share * seconds
            if count:
                seconds = seconds + self._recompute_s(stage, begin, end)
            if most_exposed_s is not None:
                table = self.tables[self.stages.ends(stage)]
                seconds = np.where(table.exposed_s[count - table.fewest] <= most_exposed_s, seconds, np.inf)
            around = others[0][begin]
            if split.schedule == "1f1b":
                around = around + least_idle_s(
                    warm_up=after + 1,
                    num_microbatches=self.stages.batch.num_microbatches,
                    forward_s=forward,
                    backward_s=seconds - forward,
                    after_s=others[1][end],
                )
            reached = np.maximum(best[begin], self.stages.batch.num_microbatches * seconds + around)
            own = result[end]
            few[end] = np.where(reached < own, count, few[end])
            many[end] = np.where(reached <= own, count, many[end])
            result[end] = np.minimum(own, reached)
        return result, few, many

    def _seconds(self, stage: int, count: int, layers_s: FloatArray) -> FloatArray:
        """A micro-batch on a stage with ``count`` layers that take ``layers_s`` together, [., n]."""
        if not self.tables:
            return self.costs.base_s[stage] + layers_s
        table = self.tables[self.stages.ends(stage)]
        return np.broadcast_to(table.seconds[count - table.fewest], layers_s.shape)

    def _recompute_s(self, stage: int, begin: slice, end: slice) -> FloatArray:
        """Least time of the recompute that keeps a stage within memory, [., n]; infinite where none does."""
        costs = self.costs
        held = costs.held_bytes[stage]
        excess = costs.base_bytes[stage] + held[end] - held[begin] - self.memory_bytes
        if not (excess > 0.0).any():
            return np.zeros(1)
        excess, saved = np.maximum(excess, 0.0), costs.saved_bytes[stage]
        again = np.ceil(excess / np.where(saved > 0.0, saved, 1.0) * (1.0 - 1e-9))
        beyond = (excess > 0.0) & ((saved <= 0.0) | (again > end.start - begin.start))
        return np.where(beyond, np.inf, again * costs.again_s)

    def _cuts(self, taken: Sequence[IntArray]) -> IntArray:
        """Layers of each stage, from the last one back, [p, n]."""
        at = np.full(len(self.stages.batch), len(self.stages.kind_of), dtype=np.int64)
        counts = []
        for stage in reversed(taken):
            counts.append(stage[at, np.arange(len(at))])
            at = at - counts[-1]
        return np.stack(counts[::-1])
