"""All splits of the layers of a few stages, each with a bound of its own: what closes a candidate that stays open.

*Notation.* As in :mod:`.uneven`. A split gives stage i n_ik layers of kind k, of which e_ik(r) are among the first r of
their chunk; b_i and s_ik bytes, a_ik saved by recompute of a layer, τ_k seconds of a layer and ρ_k of its recompute.

*Memory.* All chunks recompute the same number of layers, r. b_i + Σ_k n_ik·s_ik − e_ik(r)·a_ik falls with r, so that
the least r for which no stage with layers exceeds the limit is no more than what a plan of this split recomputes.

*Bound.* t_i = base_i + Σ_k n_ik·τ_k + e_ik(r)·ρ_k grows with r: with the r above no plan of the split has faster
stages, and T ≥ A + the time of the pipeline, as the estimator has it for stages of these times; where a stage holds
unlike chunks, for these (:mod:`~meshplan.planner.training.pipeline.unlike_chunks`: the longest path of passes, which
grows with each of them).

The splits are all there are, but those with a stage that no candidate can take by itself: a candidate whose splits are
all priced, or have a bound beyond the best, is closed, and that is a proof.

Assumes: of an unrolled schedule under ZeRO-3, whose order may depend on the transfers, only the slowest stage counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.pipeline.closed_forms import (
    FORWARD_SHARE,
    UNROLLED,
    UNROLLED_IF_UNEQUAL,
    least_bubble,
    staged_pipeline_s,
)
from meshplan.planner.training.pipeline.orders import stage_of_chunk
from meshplan.planner.training.pipeline.unlike_chunks import unlike_chunks_s
from meshplan.planner.training.search.bounds.distinct import distinct
from meshplan.planner.training.search.layers.stage_costs import SplitCosts, StageCosts
from meshplan.planner.training.search.layers.uneven import UnevenSplits
from meshplan.planner.training.search.memory_savers import takes_whole_chunks

# Splits of a pipeline that are all looked at, at most, and numbers in an array at once.
MOST_SPLITS, MOST_AT_ONCE = 2_000, 1_000_000
# Keeps bounds below the estimate, whose sums run in another order.
ROUNDING = 1e-9


def every_split_s(splits: UnevenSplits, most_s: FloatArray) -> tuple[IntArray, FloatArray] | None:
    """Layers of each chunk of every split, [splits, chunks], and what no plan of it beats, s [splits, n].

    Args:
        splits: the candidates.
        most_s: steps that are no shorter than this are of no use, [n].

    Returns:
        None where there are too many splits. Seconds are infinite where a split exceeds the memory.
    """
    split, batch = splits.split, splits.batch
    costs = splits.stages.costs()
    stage_s = (most_s - splits.model.around_s()) / batch.num_microbatches
    most = _most_layers(costs, stage_s, splits.problem.limits.memory_bytes)
    places = stage_of_chunk(split.schedule, split.pipeline_parallel, split.virtual_pipeline_stages)
    ends = () if split.vocabulary_parallel else (0, len(places) - 1)
    fewest = [int(chunk not in ends) for chunk in range(len(places))]
    sizes = all_sizes(places, fewest, most, layers=len(costs.kind_of))
    if sizes is None:
        return None
    outside_s = splits.outside_s(most_s)
    rows_at_once = max(MOST_AT_ONCE // max(sizes.size, 1), 1)
    pieces = [np.zeros((len(sizes), 0))]
    for begin in range(0, len(batch), rows_at_once):
        rows = np.arange(begin, min(begin + rows_at_once, len(batch)))
        few = _Splits(splits.stages.take(rows), costs.take(rows), np.asarray(places), sizes)
        pieces.append(few.least_s(most_s[rows], outside_s[rows]))
    return sizes, np.concatenate(pieces, axis=1)


def _most_layers(costs: StageCosts, stage_s: FloatArray, memory_bytes: float) -> IntArray:
    """Layers that a stage can take by itself under any of the candidates, [p]."""
    layers, least = len(costs.kind_of), costs.layer_s.min(axis=0)
    kept = (costs.layer_bytes - costs.saved_bytes).min(axis=1)
    room = memory_bytes - costs.base_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        by_time = np.where(least > 0.0, (stage_s - costs.base_s) / least, np.inf)
        by_memory = np.where(kept > 0.0, room / kept, np.where(room >= 0.0, np.inf, 0.0))
    most = np.minimum(by_time, by_memory) * (1.0 + ROUNDING)
    return np.floor(np.clip(most, 0.0, layers).max(axis=1, initial=0.0)).astype(np.int64)


def all_sizes(places: Sequence[int], fewest: Sequence[int], most: IntArray, *, layers: int) -> IntArray | None:
    """Layers of each chunk in every split, [splits, chunks]; None where there are too many.

    Args:
        places: stage of each chunk.
        fewest: layers of each chunk at least.
        most: layers of each stage at most.
        layers: of all chunks together.

    >>> all_sizes([0, 1], [0, 0], np.array([2, 1]), layers=2).tolist()
    [[2, 0], [1, 1]]
    """
    sizes = np.zeros((1, 0), dtype=np.int64)
    held = np.zeros((1, len(most)), dtype=np.int64)
    for chunk, stage in enumerate(places):
        after = places[chunk + 1 :]
        needed = sum(fewest[chunk + 1 :])
        later = np.zeros(len(most), dtype=bool)
        later[list(after)] = True
        rest = layers - sizes.sum(axis=1)
        grown = []
        for count in range(fewest[chunk], layers + 1):
            more = held.copy()
            more[:, stage] += count
            takes = ((most - more) * later).sum(axis=1)
            rows = np.flatnonzero((more[:, stage] <= most[stage]) & (rest - count >= needed) & (rest - count <= takes))
            grown.append((np.column_stack([sizes[rows], np.full(len(rows), count)]), more[rows]))
        sizes, held = (np.concatenate(columns) for columns in zip(*grown, strict=True))
        if len(sizes) > MOST_SPLITS:
            return None
    return sizes


class _Splits:
    """Splits of some candidates, all pairs of them at once.

    Args:
        stages: the candidates.
        costs: of their stages.
        places: stage of each chunk, [chunks].
        sizes: layers of each chunk, [splits, chunks].
    """

    def __init__(self, stages: SplitCosts, costs: StageCosts, places: IntArray, sizes: IntArray) -> None:
        self.stages, self.costs, self.places, self.sizes = stages, costs, places, sizes
        self._begin = np.cumsum(sizes, axis=1) - sizes
        self._before = costs.layers_before()

    def least_s(self, most_s: FloatArray, outside_s: FloatArray) -> FloatArray:
        """The bound of the module docstring, [splits, n]; the pipeline is priced where the slowest stage leaves it."""
        batch, split = self.stages.batch, self.stages.split
        p, m = split.pipeline_parallel, batch.num_microbatches
        stage_s, again_s, again = self._stages_s()
        bubble = least_bubble(
            split.schedule, pipeline_parallel=p, virtual_pipeline_stages=split.virtual_pipeline_stages
        )
        least = np.maximum(m * stage_s.max(axis=0), (m + bubble * (p - 1)) * stage_s.mean(axis=0)) + outside_s
        rows = np.isfinite(least) & (least < most_s)
        if split.schedule in UNROLLED | UNROLLED_IF_UNEQUAL:
            rows &= batch.zero_stage < ZERO_PARAMETERS
        way, row = np.nonzero(rows)
        if len(way):
            own_s = stage_s[:, way, row]
            blocks = np.where(again_s[:, way, row] > 0.0, FORWARD_SHARE, self.stages.model.forward_share[row])
            pipeline_s = staged_pipeline_s(
                split.schedule,
                virtual_pipeline_stages=split.virtual_pipeline_stages,
                num_microbatches=m[row],
                stages_s=own_s,
                forward_share=blocks * (1.0 - again_s[:, way, row] / own_s),
            )
            least[way, row] = np.maximum(least[way, row], pipeline_s + outside_s[row])
            self._raise_unlike(least, most_s, outside_s, again)
        return least * (1.0 - ROUNDING)

    def _raise_unlike(self, least: FloatArray, most_s: FloatArray, outside_s: FloatArray, again: IntArray) -> None:
        """Raise bounds (in place) to the longest path of passes, where chunks of a stage are unlike.

        ZeRO-3's transfers are no sum over chunks: such candidates keep their bound.

        Args:
            least: bounds, [splits, n].
            most_s: steps that are no shorter than this are of no use, [n].
            outside_s: A, [n].
            again: recomputed layers of each chunk, [splits, n].
        """
        costs, batch, split = self.costs, self.stages.batch, self.stages.split
        p, v = split.pipeline_parallel, split.virtual_pipeline_stages
        held = self._chunks(int(self.sizes.max(initial=0))).reshape(len(self.sizes), v, p, -1)
        unlike = (held != held[:, :1]).any(axis=(1, 2, 3))
        way, row = np.nonzero((least < most_s) & unlike[:, None] & (batch.zero_stage < ZERO_PARAMETERS))
        if split.schedule != "interleaved" or not len(way):
            return
        seconds = np.einsum("svpk,ks->vps", held[way], costs.layer_s[:, row])
        if split.vocabulary_parallel:
            seconds += costs.base_s[:, row] / v
        else:  # embedding and LM head lie on the first and on the last chunk
            seconds[0, 0] += costs.base_s[0, row]
            seconds[-1, -1] += costs.base_s[-1, row]
        more = np.zeros_like(seconds)
        for number in sorted(set(again[way, row].tolist())):
            own = np.flatnonzero(again[way, row] == number) if number else ()
            if len(own):
                blocks = self._chunks(number).reshape(held.shape)[way[own]]
                more[..., own] = np.einsum("svpk,ks->vps", blocks, costs.again_s[:, row[own]])
        forward = self.stages.model.forward_share[row] * seconds
        pipeline_s = unlike_chunks_s(forward, seconds - forward + more, batch.num_microbatches[row], least=True)
        least[way, row] = np.maximum(least[way, row], pipeline_s + outside_s[row])

    def _stages_s(self) -> tuple[FloatArray, FloatArray, IntArray]:
        """A micro-batch on each stage, and what of it is recompute, s [p, splits, n], infinite beyond the memory; how
        many layers of each chunk are recomputed, [splits, n].
        """
        costs, counts = self.costs, self._counts(int(self.sizes.max(initial=0)))
        again, fits = self._least_recomputed(counts)
        seconds = costs.base_s[:, None] + np.einsum("spk,kn->psn", counts, costs.layer_s)
        seconds = np.where(fits, seconds, np.inf)
        again_s = np.zeros_like(seconds)
        for number in distinct(again[again > 0])[0].tolist():
            in_blocks = np.einsum("spk,kn->psn", self._counts(number), costs.again_s)
            again_s = np.where(again == number, in_blocks, again_s)
        return seconds + again_s, again_s, again

    def _least_recomputed(self, counts: IntArray) -> tuple[IntArray, FloatArray]:
        """Fewest recomputed layers of each chunk, [splits, n], and whether any number brings the split within memory.

        Args:
            counts: layers of each kind on each stage, [splits, p, kinds].
        """
        costs, problem = self.costs, self.stages.problem
        limit = problem.limits.memory_bytes
        lacking = costs.base_bytes + np.einsum("spk,pkn->spn", counts, costs.layer_bytes) - limit
        lacking[counts.sum(axis=2) == 0] = -np.inf  # another bound knows what an end alone needs
        lacking -= ROUNDING * limit
        fits = (lacking <= 0.0).all(axis=1)
        again = np.zeros(fits.shape, dtype=np.int64)
        longest = self.sizes.max(axis=1, initial=0) + takes_whole_chunks(problem) - 1
        for number in range(1, int(longest.max(initial=0)) + 1):
            if fits.all() or not costs.saved_bytes.any():
                break
            saved = np.einsum("spk,pkn->spn", self._counts(number), costs.saved_bytes)
            enough = ~fits & (lacking <= saved).all(axis=1) & (number <= longest)[:, None]
            again[enough] = number
            fits |= enough
        return again, fits

    def _counts(self, most: int) -> IntArray:
        """Layers of each kind among the first ``most`` of every chunk, by stage, [splits, p, kinds]."""
        inside = self._chunks(most)
        counts = np.zeros((len(self.sizes), self.stages.split.pipeline_parallel, inside.shape[2]), dtype=np.int64)
        for chunk, stage in enumerate(self.places):
            counts[:, stage] += inside[:, chunk]
        return counts

    def _chunks(self, most: int) -> IntArray:
        """The same by chunk, [splits, chunks, kinds]."""
        end = self._begin + np.minimum(self.sizes, most)
        return (self._before[:, end] - self._before[:, self._begin]).transpose(1, 2, 0)
