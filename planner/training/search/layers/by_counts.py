"""What no split of a candidate's layers beats, told from how many layers each stage holds: cheap, whatever the chunks.

For interleaved pipelines of so many chunks that :mod:`.chunk_tree` has too many ways to fill a stage: its first bound,
of numbers of layers, without the ways.

*Notation.* As in :mod:`.chunk_tree`. A stage of n layers of which the first r of each chunk are recomputed repeats K =
Σ min(x_c, r) layers, x_1 … x_v on its chunks. With d bytes beyond the memory and a bytes saved by recompute of a layer,

    K ≥ ⌈d/a⌉      K ≥ Σ_c min(g_c, r) + min over chunks q of min(g_q + n − Σ g, r) − min(g_q, r)

where g_c layers, 1 or 0, lie on a chunk at least: Σ min(x_c, r) is concave in where the other n − Σ g lie, and least
where one chunk takes them all. Nothing is within memory where ⌈d/a⌉ > min(n, v·r).

*Bound.* With these K each n has its least time. All n_1 … n_p with Σ n = L whose stages take less than the best step
leaves them are looked at (:func:`~.compositions.compositions`); the closed form of the pipeline grows with the time of
each stage, so that the least over them and over r is a bound of all splits. More recompute than v·r ≥ n only adds.

Where other kinds of layer lead the model, the layers of the main kind alone are a bound. The first chunks may hold none
of them, and of theirs fewer than r may be recomputed: nothing is claimed of these chunks.

Assumes: other kinds lead the model; no transfers of ZeRO-3, which are no sum over layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.pipeline.closed_forms import staged_pipeline_s
from meshplan.planner.training.search.layers.compositions import compositions
from meshplan.planner.training.search.layers.stage_costs import StageCosts
from meshplan.planner.training.search.layers.uneven import UnevenSplits
from meshplan.planner.training.search.memory_savers import takes_whole_chunks

# Numbers of layers of all stages that are looked at, at most.
MOST_COUNTS = 20_000
# Keeps bounds below the estimate, whose sums run in another order.
ROUNDING = 1e-9


def least_by_counts_s(splits: UnevenSplits, most_s: float, outside_s: float) -> float:
    """No plan of one candidate is faster, s; −∞ where nothing can be told.

    Args:
        splits: the candidate, one of which :func:`~.chunk_tree.may_be_closed` is true.
        most_s: steps that are no shorter than this are of no use: the bound is no larger.
        outside_s: A.
    """
    found = _open_counts(splits, (most_s - outside_s) * (1.0 + ROUNDING))
    if found is None:
        return -np.inf
    least_s = min((float(pipelines_s.min()) for _, pipelines_s in found), default=np.inf)
    return min(most_s, (least_s + outside_s) * (1.0 - ROUNDING))


def held_by_stages(splits: UnevenSplits, most_s: float) -> list[set[int]] | None:
    """Numbers of layers that each stage of one candidate may hold in a pipeline that takes less than ``most_s``.

    None where nothing can be told; of layers of one kind alone.
    """
    if len(set(splits.kind_of)) > 1:
        return None
    found = _open_counts(splits, most_s)
    if found is None:
        return None
    stages = range(splits.split.pipeline_parallel)
    return [{count for counts, _ in found for count in counts[stage].tolist()} for stage in stages]


def fewest_repeated(fewest: IntArray, counts: IntArray, again: int, leads: BoolArray) -> IntArray:
    """Σ min(x_c, r) at least over all ways to lay so many layers on the chunks of each stage, [p, counts].

    Args:
        fewest: g, layers of each chunk at least, [p, v].
        counts: n, layers of a stage; those below Σ g stand for nothing.
        again: r.
        leads: chunks of which nothing is claimed, [p, v].

    >>> fewest_repeated(np.array([[1, 1, 0]]), np.arange(6), 2, np.zeros((1, 3), dtype=bool)).tolist()
    [[2, 2, 2, 3, 3, 3]]
    """
    rest = np.maximum(counts - fewest.sum(axis=1, keepdims=True), 0)
    inside = np.minimum(fewest, again)
    added = np.minimum(fewest[:, None] + rest[..., None], again) - inside[:, None]
    added = np.where(leads[:, None], 0, added)
    return np.asarray(inside.sum(axis=1, keepdims=True) + added.min(axis=2))


def _open_counts(splits: UnevenSplits, most_s: float) -> list[tuple[IntArray, FloatArray]] | None:
    """For each r layers of each stage whose pipeline takes less than ``most_s``, and that, s; None: too many."""
    costs = splits.stages.costs()
    main = costs.kind_of[-1]
    leading = len(costs.kind_of) - costs.kind_of.count(main)
    try:
        return list(_Stages(splits, costs.of_kind(main), leading, most_s).pipelines())
    except _TooManyError:
        return None


class _TooManyError(Exception):
    """More numbers of layers than can be looked at."""


@dataclass(frozen=True, slots=True)
class _Stages:
    """Stages of one candidate by their number of layers.

    Args:
        splits: the candidate.
        costs: of its stages, of the main kind.
        leading: layers of other kinds, which lead the model.
        most_s: pipelines that take no less are of no use.
    """

    splits: UnevenSplits
    costs: StageCosts
    leading: int
    most_s: float

    def pipelines(self) -> Iterator[tuple[IntArray, FloatArray]]:
        """For each r that may be needed: layers of each stage, [p, N], and the pipeline of each, s [N], N above 0."""
        split, m = self.splits.split, int(self.splits.batch.num_microbatches[0])
        layers, limit_s = len(self.costs.kind_of), self.most_s / m
        share = float(self.splits.model.forward_share[0])
        plain_s = self.costs.base_s[:, :1] + np.arange(layers + 1) * self.costs.layer_s[0, 0]
        plain_s = plain_s[:, plain_s.min(axis=0) <= limit_s * (1.0 + ROUNDING)]
        most, chunks = plain_s.shape[1] - 1, split.virtual_pipeline_stages
        fewest = self._fewest().sum(axis=1).tolist()
        for again in range(min(-(-most // chunks), layers - 1 + takes_whole_chunks(self.splits.problem)) + 1):
            repeated = self._repeated(again, most)
            more_s = np.where(np.isfinite(repeated), repeated, 0.0) * self.costs.again_s[0, 0]
            seconds = np.where(np.isfinite(repeated), plain_s + more_s, np.inf)
            counts = compositions(seconds, limit_s, first=0, fewest=fewest, layers=layers, most_found=MOST_COUNTS)
            if counts is None:
                raise _TooManyError
            at = np.arange(len(seconds))[:, None], counts
            stages_s, shares = seconds[at], np.full(counts.shape, share)
            # Layers of another kind may fill a stage by themselves, which takes no time then.
            np.divide(share * plain_s[at], stages_s, out=shares, where=stages_s > 0.0)
            pipelines_s = staged_pipeline_s(
                split.schedule,
                virtual_pipeline_stages=chunks,
                num_microbatches=np.full(counts.shape[1], m),
                stages_s=stages_s,
                forward_share=shares,
            )
            is_open = pipelines_s < self.most_s
            if is_open.any():
                yield counts[:, is_open], pipelines_s[is_open]

    def _repeated(self, again: int, most: int) -> FloatArray:
        """K at least by stage and number of layers, [p, most + 1]; infinite beyond the memory."""
        costs, fewest = self.costs, self._fewest()
        counts, chunks = np.arange(most + 1), fewest.shape[1]
        limit = self.splits.problem.limits.memory_bytes * (1.0 + ROUNDING)
        lacking = np.maximum(costs.base_bytes[:, :1] + counts * costs.layer_bytes[:, 0, :1] - limit, 0.0)
        saved = np.maximum(costs.saved_bytes[:, 0, :1], 1e-12)
        needed = np.where(counts > 0, np.ceil(lacking / saved - ROUNDING), 0.0)
        least = fewest_repeated(fewest, counts, again, self._leads())
        return np.where(needed <= np.minimum(counts, chunks * again), np.maximum(needed, least), np.inf)

    def _fewest(self) -> IntArray:
        """Layers of each chunk of each stage at least, [p, v]: the embedding or the head alone may fill one."""
        fewest = (~self._leads()).astype(np.int64)
        if not self.splits.split.vocabulary_parallel:
            fewest[0, 0] = fewest[-1, -1] = 0
        return fewest

    def _leads(self) -> BoolArray:
        """Chunks that layers of other kinds may be on, [p, v]: the first of the model, one of which may be empty."""
        p, v = self.splits.split.pipeline_parallel, self.splits.split.virtual_pipeline_stages
        chunk = np.arange(v) * p + np.arange(p)[:, None]
        return np.asarray((chunk <= self.leading) & (self.leading > 0))
