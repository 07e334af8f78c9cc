"""How many layers should each pipeline stage hold? Every split, under a bound; those that may win, priced.

*Notation.* L layers in order on p stages of v chunks. Stage i with the layers k ≤ l < j takes t_i(k, j) seconds for a
micro-batch (the embedding on the first stage, the LM head with multi-token prediction on the stage of the last chunk),
needs M_i(k, j) bytes with n_i micro-batches in flight, and recomputes at least r_i(k, j) layers to stay within the
device: that time is part of t_i. m micro-batches. A chunk holds a layer or more; the first and the last may hold none,
because the embedding and the head are there.

*Objective.* min over cuts 0 = c_0 ≤ c_1 ≤ … ≤ c_p = L of the step T.

*Bound.* A stage does all its micro-batches, after the first one has passed the stages before it and before the last one
passes back: T ≥ A + max_i (m·t_i + φ/v·Σ_{h<i} t_h), with φ = 1 in (interleaved) 1F1B and GPipe, 0 where a schedule may
hide it (in 1F1B it also idles for the stages after it, :mod:`~meshplan.planner.training.pipeline.idle`), and A the
messages, fixed overhead, optimizer and exposed gradient reduction of the fullest stage, of ⌈L/p⌉ layers or more. Also
T ≥ A + mean t·(m + β'(p − 1)) (:func:`~.closed_forms.least_bubble`), which holds for any split.

*Method.* A dynamic programme over the stages (:mod:`.recurrence`), exact, for many candidates at once. Where stages
expose different amounts of gradient reduction, x_i, the programme runs once for each limit on x_i. Its splits, with
spare layers early and late, are priced; of candidates that are still open the bound is kept. Where few splits are left
all of them are looked at, which is exact.

Assumes: t and M grow by the same amount with each layer of a kind. Where chunks take different kinds of layer from
several places, all count as the least kind, and :mod:`.mixed_kinds` has further bounds. Where each stage gathers its
parameters (ZeRO-3), the least that it may gather counts as memory, and the transfers as time only where layers are
alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.pipeline.closed_forms import least_bubble, staged_pipeline_s
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.bounds.distinct import distinct
from meshplan.planner.training.search.layers.compositions import chunks_of, compositions
from meshplan.planner.training.search.layers.counted_stages import stage_of, unit
from meshplan.planner.training.search.layers.mixed_kinds import leading_by_slowest_s, leading_layers_s, main_kind_s
from meshplan.planner.training.search.layers.recurrence import AHEAD, Recurrence, longest_stage
from meshplan.planner.training.search.layers.stage_costs import (
    SplitCosts,
    StageCosts,
    StageTable,
)

# Exposed gradient reductions that a bound tells apart, at most, and the least spread of them that is worth it: part of
# the longest step of use.
MOST_EXPOSED, LEAST_SPREAD = 16, 0.02
# Longest step of use where nothing limits it, s: finite, so that what hides behind it can be worked out.
UNLIMITED_S = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A split of the layers for each candidate, [p, n] each.

    Args:
        counts: layers of each stage; none where nothing was found.
        leading: of these, layers of another kind on each of the first chunks; None where they do not matter.
    """

    counts: IntArray
    leading: IntArray | None = None


def may_be_uneven(problem: TrainingProblem) -> bool:
    """Whether stages may hold different numbers of layers, and nobody pinned how many."""
    return problem.rules.layer_splits is None and "layers_per_chunk" not in problem.fixed


class UnevenSplits:
    """The bound of the splits of one batch, and the splits that attain it.

    Args:
        problem: the question.
        batch: candidates under the usual split of their stages and chunks.
        most_chunks: the bounds hold for interleaving with any number of chunks v from that of the split to this one;
            None: with that of the split. Messages and the fewest layers of a stage grow with v, the bubble falls.
    """

    def __init__(self, problem: TrainingProblem, batch: Candidates, most_chunks: int | None = None) -> None:
        self.problem, self.batch, self.split = problem, batch, batch.split
        self.stages = SplitCosts(problem, batch, most_chunks)
        self.kinds, self.kind_of, self.model = self.stages.kinds, self.stages.kind_of, self.stages.model
        self.tables: dict[tuple[bool, bool], StageTable] = {}
        self._quick: tuple[FloatArray, FloatArray] | None = None
        self._endings: tuple[FloatArray, ...] = ()

    def take(self, rows: IntArray) -> UnevenSplits:
        """The same of some candidates, with what is known of them."""
        other = UnevenSplits(self.problem, self.batch.take(rows), self.stages.most_chunks)
        if self._quick is not None:
            other._quick = self._quick[0][rows], self._quick[1][rows]
        other._endings = tuple(known[rows] for known in self._endings)
        other.stages = self.stages.take(rows)
        other.model = other.stages.model
        other.tables = {ends: table.take(rows) for ends, table in self.tables.items()}
        if "around_s" in self.__dict__:
            other.__dict__["around_s"] = self.around_s[rows]
        return other

    def no_less_than(self, row: int, outside_s: FloatArray) -> BoolArray:
        """Candidates that take no less time and memory than one of them whatever their split, so that its bounds are
        theirs, [n].

        Args:
            row: that one.
            outside_s: A of each candidate, [n].
        """
        costs, batch = self.stages.costs(), self.batch
        backward_s = (1.0 - self.model.forward_share) * costs.layer_s + costs.again_s  # of a layer that is recomputed
        grow = (costs.layer_s, costs.base_s, backward_s, costs.layer_bytes, costs.base_bytes, -costs.saved_bytes)
        is_more = outside_s >= outside_s[row]
        for column in (batch.num_microbatches, self.model.forward_share, batch.zero_stage >= ZERO_PARAMETERS):
            is_more &= np.broadcast_to(column, len(batch)) == np.broadcast_to(column, len(batch))[row]
        for own in grow:
            is_more &= (own >= own[..., [row]]).reshape(-1, len(batch)).all(axis=0)
        return is_more

    @cached_property
    def around_s(self) -> FloatArray:
        """Messages, fixed overhead and waiting, [n]."""
        return self.model.around_s()

    def quick_bound_s(self) -> FloatArray:
        """No split, and no sharding, is faster, [n]: the mean stage with the least bubble, or the slowest one alone."""
        return np.maximum(*self.quick_bounds_s())

    def quick_bounds_s(self) -> tuple[FloatArray, FloatArray]:
        """Both parts of :meth:`quick_bound_s`: of the mean stage, and of the slowest one, [n] each."""
        if self._quick is None:
            self._quick = self._priced_quickly()
        return self._quick

    def _priced_quickly(self) -> tuple[FloatArray, FloatArray]:
        split, batch, model = self.split, self.batch, self.stages.unsharded
        totals = [self.kind_of.count(kind) for kind in range(len(self.kinds))]
        fewer = [totals[0] - 1, *totals[1:]]
        is_split = split.vocabulary_parallel
        share = 1.0 if is_split else 0.0
        total_s, without_s = model.stages_s(
            [
                replace(stage_of(counts, first=not is_split, head=not is_split), vocabulary_share=share)
                for counts in (totals, fewer)
            ]
        )
        around_s = model.around_s()
        mean_s = around_s + total_s * self.passes()
        if len(self.kinds) > 1:
            return mean_s, mean_s
        return mean_s, around_s + batch.num_microbatches * self._least_slowest_s(total_s, total_s - without_s)

    def passes(self) -> FloatArray:
        """How often the mean stage's micro-batch is in a step at least: m and the least bubble, over p, [n]."""
        return np.asarray((self.batch.num_microbatches + self._bubble()) / self.split.pipeline_parallel)

    def sharp_bound_s(self, outside_s: FloatArray) -> FloatArray:
        """The quick bound with what each candidate's own sharding adds, and with what follows the pipeline, [n].

        ZeRO-3 exposes max(moved − o·busy, (1 − o)·moved) of a stage's transfers, which is convex: over the mean stage
        it is no more than on average, however layers are split. Where some layers are gathered otherwise, transfers are
        left out.

        Args:
            outside_s: of :meth:`outside_s`, [n].
        """
        batch, split, kinds = self.batch, self.split, len(self.kinds)
        after_s = outside_s - self.around_s
        quick_s = self.quick_bound_s()
        full = (batch.zero_stage >= ZERO_PARAMETERS) & (batch.zero_hpz_partition_size == 1)
        full &= batch.gathered_num_layers == 0
        if full.any():
            is_split = split.vocabulary_parallel
            counts = tuple(self.kind_of.count(kind) for kind in range(kinds))
            whole = replace(
                stage_of(counts, first=not is_split, head=not is_split), vocabulary_share=1.0 if is_split else 0.0
            )
            total_s = self.model.stages_s([whole])[0]
            mean_s = total_s / split.pipeline_parallel * (batch.num_microbatches + self._bubble())
            quick_s = np.where(full, np.maximum(quick_s, self.around_s + mean_s * (1.0 - 1e-9)), quick_s)
        # Messages that no work is long enough to hide: T ≥ m·t − m·t + all of them, for the slowest stage's t.
        idle_s = np.zeros(len(batch))
        saturated_s = self.model.neighbour_messages_s(idle_s) + np.asarray(self.model.calibration.time.step_overhead_s)
        return np.maximum(quick_s, saturated_s) + after_s

    def _least_slowest_s(self, total_s: FloatArray, layer_s: FloatArray) -> FloatArray:
        """τ, the least time of the slowest stage, [n], for layers that are alike.

        p − 2 stages hold ⌊τ/ℓ⌋ layers each, and the two with the ends, which take E by themselves, ⌊(2τ − E)/ℓ⌋:
        enough for all L. With k = ⌊mean/ℓ⌋ that is τ = ((L − (p − 2)·k)·ℓ + E)/2 or (k + 1)·ℓ, whichever is less.
        """
        p, layers = self.split.pipeline_parallel, len(self.kind_of)
        mean_s = total_s / p
        ends_s = np.maximum(total_s - layers * layer_s, 0.0)
        whole = np.floor(mean_s / layer_s * (1.0 + 1e-9))
        ends_full_s = ((layers - (p - 2) * whole) * layer_s + ends_s) / 2.0
        return np.maximum(mean_s, np.minimum(ends_full_s, (whole + 1.0) * layer_s)) * (1.0 - 1e-9)

    def _bubble(self) -> float:
        split = self.split
        least = least_bubble(
            split.schedule,
            pipeline_parallel=split.pipeline_parallel,
            virtual_pipeline_stages=self.stages.most_chunks,
        )
        return least * (split.pipeline_parallel - 1)

    # --- the dynamic programme ----------------------------------------------------------------------------------------

    def solve(self, most_s: FloatArray) -> tuple[FloatArray, list[Found]]:
        """The bound of each candidate, and the layers of each stage that attain it in two ways.

        Args:
            most_s: steps that are no shorter than this are of no use, [n].

        Returns:
            Bound of the step, [n], infinite where no split is within memory and ``most_s``, beside
            :meth:`sharp_bound_s`; the splits.
        """
        split, batch, layers, m = self.split, self.batch, len(self.kind_of), self.batch.num_microbatches
        each = self.stages.costs()
        mixed = len(self.kinds) > 1 and split.virtual_pipeline_stages > 1
        costs = each.of_the_least_layer() if mixed else each
        is_full = batch.zero_stage >= ZERO_PARAMETERS
        any_chunks = self.stages.most_chunks > split.virtual_pipeline_stages
        exact = ~costs.saved_bytes.any(axis=(0, 1))
        if not any_chunks:  # what fits with one number of chunks may not with another
            exact |= self._always_fits(costs) & ~is_full
        stage_s = (most_s - self.around_s) / m
        fewest_layers = [self.stages.fewest_layers(stage) for stage in range(split.pipeline_parallel)]
        longest = longest_stage(costs, fewest_layers, stage_s, split.virtual_pipeline_stages)
        # What a stage recomputes hides more of its gradients, at most as if it took all of the longest step.
        busy_s = np.where(exact, 0.0, np.where(np.isfinite(most_s), most_s, UNLIMITED_S) / m)
        fewest = max(layers - (split.pipeline_parallel - 1) * longest, 0)
        self.tables = self.stages.tables(fewest, longest, busy_s)
        if self.tables and is_full.any():  # more work hides more of the transfers
            hidden = float(np.max(self.problem.calibration.time.fully_sharded_overlap))
            costs = replace(costs, again_s=np.where(is_full, (1.0 - hidden) * costs.again_s, costs.again_s))
        outside = self.outside_s(most_s)
        recurrence = Recurrence(
            stages=self.stages,
            costs=costs,
            tables=self.tables,
            fewest=fewest_layers,
            longest=longest,
            memory_bytes=self.problem.limits.memory_bytes,
        )
        least, few, many = recurrence.solve()
        if mixed:
            least = np.maximum(least, main_kind_s(recurrence, each, stage_s))
        bound = least + outside
        found = [Found(counts=few), Found(counts=many)]
        if self.tables:  # else they add nothing to the bound that the candidates came with
            bound = np.maximum(bound, self.sharp_bound_s(outside))
        if mixed:
            self._leading(recurrence, each, most_s, outside, bound, found)
        if self.tables:
            self._trade_off(recurrence, most_s, (outside, least), bound, found)
            if not any_chunks:
                self._enumerate(costs, (exact | is_full) & (bound < most_s), most_s, bound, found)
        return bound, found

    def _leading(
        self,
        recurrence: Recurrence,
        each: StageCosts,
        most_s: FloatArray,
        outside_s: FloatArray,
        bound: FloatArray,
        found: list[Found],
    ) -> None:
        """Where some kinds only lead the model, look at every place of theirs, for candidates that are still open.

        Args:
            recurrence: the dynamic programme.
            each: costs with all kinds.
            most_s: steps that are no shorter than this are of no use, [n].
            outside_s: A, [n].
            bound: of each candidate, [n]; changed in place.
            found: splits of the layers; those that attain the new bound are added.
        """
        rows = np.flatnonzero((bound < most_s) & (self.batch.zero_stage < ZERO_PARAMETERS))
        if not len(rows):
            return
        stages = self.stages.take(rows)
        stage_s = (most_s - self.around_s)[rows] / stages.batch.num_microbatches
        least, chosen, on_chunks = leading_layers_s(replace(recurrence, stages=stages), each.take(rows), stage_s)
        bound[rows] = np.maximum(bound[rows], least + outside_s[rows])
        left = bound[rows] < most_s[rows]
        if left.any() and self.split.schedule in AHEAD:
            some = replace(recurrence, stages=stages.take(np.flatnonzero(left)))
            waiting_s = leading_by_slowest_s(some, each.take(rows[left]), stage_s[left]) + outside_s[rows[left]]
            bound[rows[left]] = np.maximum(bound[rows[left]], waiting_s)
        best, leading = found[0].counts.copy(), np.zeros_like(found[0].counts)
        best[:, rows], leading[:, rows] = chosen, on_chunks
        found.append(Found(counts=best, leading=leading))

    def _trade_off(
        self,
        recurrence: Recurrence,
        most_s: FloatArray,
        free: tuple[FloatArray, FloatArray],
        bound: FloatArray,
        found: list[Found],
    ) -> None:
        """Weigh the slowest stage against the one that exposes most of its gradients, which is another one.

        T ≥ A + min over x of (x + D of stages that expose x or less), A without gradients; between two x the lower one.

        Args:
            recurrence: the dynamic programme.
            most_s: steps that are no shorter than this are of no use, [n].
            free: A, and D without a limit, [n] each.
            bound: of each candidate, [n]; changed in place.
            found: splits of the layers; those that attain the new bound are added.
        """
        outside, free_s = free
        values = np.sort(np.concatenate([table.exposed_s for table in self.tables.values()]), axis=0)
        around, rows = self.around_s, (bound < most_s) & (values[-1] > values[0] + LEAST_SPREAD * most_s)
        # Of use is what the quickest pipeline leaves of the longest step; what is below A counts with the first.
        of_use = rows & (values + around + free_s <= most_s)
        first = int(np.count_nonzero(((values + around < outside) | ~rows).all(axis=1)))
        between = np.flatnonzero(of_use.any(axis=1))
        between = between[min(first, max(len(between) - 1, 0)) :]
        if len(between):
            between = between[distinct(np.linspace(0, len(between) - 1, MOST_EXPOSED).astype(np.int64))[0]]
        least, chosen, lower = most_s.copy(), found[0].counts.copy(), 0
        for upper in between.tolist():
            pipeline, few, _ = recurrence.solve(values[upper])
            step = pipeline + np.maximum(around + values[lower], outside)
            chosen = np.where(step < least, few, chosen)
            least, lower = np.minimum(step, least), upper + 1
        bound[rows] = np.maximum(bound, least * (1.0 - 1e-12))[rows]
        found += [Found(counts=chosen)] if len(between) else []

    def _enumerate(
        self, costs: StageCosts, rows: BoolArray, most_s: FloatArray, bound: FloatArray, found: list[Found]
    ) -> None:
        """Where few splits are left, price all of them: their least is the bound (changed in place)."""
        split, batch = self.split, self.batch
        p = split.pipeline_parallel
        around, best = self.around_s, found[0].counts.copy()
        tables = [self.tables[self.stages.ends(stage)] for stage in range(p)]
        for row in np.flatnonzero(rows).tolist():
            seconds = np.stack([table.seconds[:, row] for table in tables])
            most = float((most_s[row] - around[row]) / batch.num_microbatches[row])
            fewest = [self.stages.fewest_layers(stage) for stage in range(p)]
            counts = compositions(seconds, most, first=tables[0].fewest, fewest=fewest, layers=len(self.kind_of))
            if counts is None or not counts.shape[1]:
                continue
            at = counts - tables[0].fewest
            stages = np.arange(p)[:, None]
            pipeline = staged_pipeline_s(
                split.schedule,
                virtual_pipeline_stages=split.virtual_pipeline_stages,
                num_microbatches=np.full(counts.shape[1], batch.num_microbatches[row]),
                stages_s=seconds[stages, at],
                forward_share=float(self.model.forward_share[row]),
            )
            exposed = np.stack([table.exposed_s[:, row] for table in tables])[stages, at].max(axis=0)
            optimizer = np.stack([table.optimizer_s[:, row] for table in tables])[stages, at].max(axis=0)
            total = pipeline + exposed + optimizer + around[row]
            least = int(np.argmin(total))
            bound[row] = max(bound[row], float(total[least]) * (1.0 - 1e-12))
            best[:, row] = counts[:, least]
        found.append(Found(counts=best))

    def _always_fits(self, costs: StageCosts) -> FloatArray:
        """Candidates that need no recompute whatever their split, [n] booleans."""
        whole = costs.base_bytes + np.einsum("k,pkn->pn", costs.layers_before()[:, -1], costs.layer_bytes)
        return np.asarray((whole <= self.problem.limits.memory_bytes).all(axis=0))

    def outside_s(self, most_s: FloatArray) -> FloatArray:
        """A of the module docstring, [n]: some stage has ⌈L/p⌉ layers or more, and there are those with the ends."""
        longest_s = np.where(np.isfinite(most_s), most_s, UNLIMITED_S) / self.batch.num_microbatches
        mean_s, least_s = self._endings_s(longest_s)
        usual = -(-len(self.kind_of) // self.split.pipeline_parallel)
        if self.tables:
            above = [table for table in self.tables.values() if len(table.seconds) > usual - table.fewest >= 0]
            exposed, optimizer = [], []
            if above:
                exposed.append(
                    np.minimum.reduce([table.exposed_s[usual - table.fewest :].min(axis=0) for table in above])
                )
                optimizer.append(np.minimum.reduce([table.optimizer_s[usual - table.fewest] for table in above]))
            for ends, table in self.tables.items():
                if any(ends):
                    exposed.append(table.exposed_s.min(axis=0))
                    optimizer.append(table.optimizer_s.min(axis=0))
            if exposed:
                least_s = np.maximum.reduce(exposed) + np.maximum.reduce(optimizer)
        return np.maximum(self.around_s + mean_s, self.around_s + least_s)

    def _endings_s(self, longest_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What follows the pipeline on a mean stage, and at least on one of ⌈L/p⌉ layers, [n] each."""
        if not self._endings or not np.array_equal(self._endings[0], longest_s):  # asked again of those that are left
            self._endings = longest_s, self._mean_ending_s(longest_s), self._least_ending_s(longest_s)
        return self._endings[1], self._endings[2]

    def _least_ending_s(self, longest_s: FloatArray) -> FloatArray:
        usual = -(-len(self.kind_of) // self.split.pipeline_parallel)
        after_s = np.minimum.reduce([self._after_s(kind, usual, longest_s) for kind in range(len(self.kinds))])
        if len(self.kinds) > 1:  # some stage has its share of each kind, whatever else it has
            shares = [-(-self.kind_of.count(kind) // self.split.pipeline_parallel) for kind in range(len(self.kinds))]
            own_s = [self._after_s(kind, share, longest_s) for kind, share in enumerate(shares)]
            after_s = np.maximum.reduce([after_s, *own_s])
        return np.asarray(after_s)

    def _after_s(self, kind: int, count: int, longest_s: FloatArray) -> FloatArray:
        """What follows the pipeline on a stage with ``count`` layers of a kind, behind ``longest_s`` of work, [n]."""
        exposed_s, optimizer_s = self.model.ending_s(stage_of(unit(kind, len(self.kinds), count)), longest_s)
        return exposed_s + optimizer_s

    def _mean_ending_s(self, longest_s: FloatArray) -> FloatArray:
        """What follows the pipeline on a stage with the mean number of parameters, [n]: some stage has as many.

        Both parts grow with a stage's parameters. Left at 0 where layers differ or adapters are trained, because a
        stage without any expert or adapter skips a collective.
        """
        if len(self.kinds) > 1 or self.problem.workload.phase.has_adapters:
            return np.zeros(len(self.batch))
        p = self.split.pipeline_parallel
        mean_layers: Any = len(self.kind_of) / p
        mean = replace(stage_of([1]), layers=(mean_layers,), vocabulary_share=1.0 / p)
        exposed_s, optimizer_s = self.model.ending_s(mean, longest_s)
        return (exposed_s + optimizer_s) * (1.0 - 1e-9)

    # --- splits -------------------------------------------------------------------------------------------------------

    def worth_pricing(self, found: Sequence[Found], rows: IntArray) -> Iterator[tuple[tuple[int, ...], IntArray]]:
        """Splits → the candidates, of ``rows``, that want them; the usual split is left out."""
        wanted: dict[tuple[int, ...], list[int]] = {}
        for one in found:
            for row in rows.tolist():
                leading = () if one.leading is None else one.leading[:, row].tolist()
                sizes = chunks_of(self.split, one.counts[:, row].tolist(), len(self.kind_of), leading)
                if sizes is not None and sizes != self.split.layers_per_chunk:
                    wanted.setdefault(sizes, []).append(row)
        for sizes, takers in wanted.items():
            yield sizes, np.array(sorted(set(takers)), dtype=np.int64)
