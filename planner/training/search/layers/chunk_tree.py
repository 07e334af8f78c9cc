"""What no split of a candidate's layers beats: all numbers of layers of the stages, then all chunks of those.

The dynamic programme (:mod:`.recurrence`) knows how long a stage takes, not what its chunks make others wait, and of the
bubble of interleaved 1F1B only the part before a stage. This is for the few candidates that it leaves open.

*Notation.* As in :mod:`.uneven`. The first r layers of each chunk are recomputed. Stage i may hold the *options* o: x_1 …
x_v layers of the main kind on its chunks, n = Σ x in all, that stay within memory with r. On chunk c an option takes

    f_c = φ·(x_c·τ + e_c)      b_c = (1 − φ)·(x_c·τ + e_c) + min(x_c, max(r − l_c, 0))·ρ

with τ seconds of a layer, ρ of its recompute, φ the forward share, e_c what embedding, LM head and the l_c layers of
other kinds take that lead the model; in which ways these lie on the first chunks says :mod:`.mixed_kinds`.

*Stages.* All n_1 … n_p with Σ n = L whose stages take less, by their quickest option, than the best step leaves them
(:func:`~.compositions.compositions`). Each has a bound: the closed form of the pipeline for these times.

*Chunks.* Of those that the bound leaves, a tree over the stages, breadth first. A node holds an option of each of the
stages 0 … s; the later ones take, on each chunk, the least of any option. Its bound is the recurrence over slots for
these times (:func:`~meshplan.planner.training.pipeline.unlike_chunks.unlike_chunks_s`, ``least``). A stage whose chunks
are unlike makes its neighbours wait whatever the others do: of 16 stages of (2, 2) layers, one with (1, 3) costs 4 to 20
per cent of the step, so that few nodes are left on each level.

*Proof.* The pipeline is priced as the larger of both, of which the closed form alone counts where all chunks of each stage
are alike. Both grow with each f and b. Every plan of the candidate is, with the r that it has, a leaf: its chunks take
what its options say, or more (leading layers are recomputed for nothing and keep what recompute leaves; memory that
recompute saves is the most that a layer can save). Each node takes no more than any leaf below it, so that
no plan beats A + the least leaf, nor, of what is cut, the step it was cut at.

Assumes: layers of other kinds lead the model; no transfers of ZeRO-3, which are no sum over chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.pipeline.closed_forms import staged_pipeline_s
from meshplan.planner.training.pipeline.unlike_chunks import unlike_chunks_s
from meshplan.planner.training.search.layers.compositions import compositions
from meshplan.planner.training.search.layers.mixed_kinds import MOST_LEADING, first_chunks
from meshplan.planner.training.search.layers.recurrence import AHEAD
from meshplan.planner.training.search.layers.uneven import UnevenSplits
from meshplan.planner.training.search.memory_savers import takes_whole_chunks

# Numbers of layers of all stages that are looked at, nodes of one level, and leaves that are told, at most.
MOST_COUNTS, MOST_NODES, MOST_LEAVES = 20_000, 4_000, 64
# Keeps bounds below the estimate, whose sums run in another order.
ROUNDING = 1e-9


class Leaf(NamedTuple):
    """A split of the layers that may win: layers of each chunk, and what no plan of it beats, s."""

    sizes: tuple[int, ...]
    least_s: float


class Closed(NamedTuple):
    """What is left of a candidate.

    Args:
        leaves: splits of which a plan may win, the least bound first.
        beyond_s: no plan of any other split is faster.
    """

    leaves: list[Leaf]
    beyond_s: float


class _Option(NamedTuple):
    """Layers of the main kind on each chunk of a stage; f and b of these chunks, [v] each; the least r within memory."""

    sizes: tuple[int, ...]
    forward_s: FloatArray
    backward_s: FloatArray
    again: int


def may_be_closed(splits: UnevenSplits) -> BoolArray:
    """The candidates of which :func:`closed` speaks, [n]."""
    kind_of, split = splits.kind_of, splits.split
    leading = len(kind_of) - kind_of.count(kind_of[-1])
    lead = kind_of[-1] not in kind_of[:leading] and leading <= min(MOST_LEADING, split.pipeline_parallel - 1)
    is_known = split.schedule in AHEAD and lead and splits.problem.shape.encoder is None
    return np.asarray((splits.batch.zero_stage < ZERO_PARAMETERS) & is_known)


def closed(splits: UnevenSplits, most_s: float, outside_s: float) -> Closed:
    """Every split of one candidate's layers of which a plan may take less than ``most_s``; see the module docstring.

    Args:
        splits: the candidate, one for which :func:`may_be_closed`.
        most_s: steps that are no shorter than this are of no use.
        outside_s: A.
    """
    candidate = _Candidate(splits, (most_s - outside_s) * (1.0 + ROUNDING))
    least: dict[tuple[int, ...], float] = {}
    beyond_s = np.inf
    for part in candidate.parts():
        leaves, part_s = part.solve()
        beyond_s = min(beyond_s, part_s)
        for sizes, least_s in leaves:
            least[sizes] = min(least.get(sizes, np.inf), least_s)
    leaves = [Leaf(sizes, (least_s + outside_s) * (1.0 - ROUNDING)) for sizes, least_s in least.items()]
    leaves.sort(key=lambda leaf: (leaf.least_s, leaf.sizes))
    beyond = [(beyond_s + outside_s) * (1.0 - ROUNDING), *(leaf.least_s for leaf in leaves[MOST_LEAVES:])]
    return Closed(leaves[:MOST_LEAVES], min(most_s, *beyond))


class _Candidate:
    """What the stages of one candidate may hold.

    Args:
        splits: the candidate.
        most_s: pipelines that take no less are of no use.
    """

    def __init__(self, splits: UnevenSplits, most_s: float) -> None:
        self.split, self.most_s = splits.split, most_s
        self.m = int(splits.batch.num_microbatches[0])
        self.costs = splits.stages.costs()
        self.memory_bytes = splits.problem.limits.memory_bytes
        self.share = float(np.broadcast_to(splits.model.forward_share, 1)[0])
        self.main = self.costs.kind_of[-1]
        self.layers = self.costs.kind_of.count(self.main)
        self._longest = self.layers - 1 + takes_whole_chunks(splits.problem)

    def parts(self) -> Iterator[_Part]:
        """A search for each way in which other kinds lie on the first chunks, and each number r that is the least."""
        leading = len(self.costs.kind_of) - self.layers
        for lead in first_chunks(leading) if leading else ((),):
            stages = [list(self._options(stage, lead)) for stage in range(self.split.pipeline_parallel)]
            for again in sorted({one.again for options in stages for one in options}):
                yield _Part(self, lead, again, [self._timed(options, lead, again) for options in stages])

    def _options(self, stage: int, lead: tuple[int, ...]) -> Iterator[_Option]:
        """What a stage may hold by itself in time and memory; times without recompute."""
        costs, split = self.costs, self.split
        v, last = split.virtual_pipeline_stages, len(costs.base_s) * split.virtual_pipeline_stages - 1
        chunks = [row * len(costs.base_s) + stage for row in range(v)]
        ends = () if split.vocabulary_parallel else (0, last)
        held = [lead[chunk] if chunk < len(lead) else 0 for chunk in chunks]
        fewest = [int(chunk not in ends and not own) for chunk, own in zip(chunks, held, strict=True)]
        around_s = np.array([self._other_kinds_s(chunk, lead) for chunk in chunks])
        if split.vocabulary_parallel:
            around_s += costs.base_s[stage, 0] / v
        else:
            around_s[0] += costs.base_s[stage, 0] if stage == 0 else 0.0
            around_s[-1] += costs.base_s[stage, 0] if chunks[-1] == last else 0.0
        layer_s = float(costs.layer_s[self.main, 0])
        most = min(int((self.most_s / self.m - around_s.sum()) / layer_s * (1.0 + ROUNDING)), self.layers)
        for count in range(sum(fewest), most + 1):
            for sizes in _compositions(count, fewest):
                if chunks[0] < len(lead) - 1 and sizes[0]:  # other layers follow on the next chunk
                    continue
                again = self._least_again(stage, sizes, lead)
                if again is not None:
                    plain = np.array(sizes) * layer_s + around_s
                    yield _Option(sizes, self.share * plain, (1.0 - self.share) * plain, again)

    def _other_kinds_s(self, chunk: int, lead: tuple[int, ...]) -> float:
        """What the layers of other kinds on a chunk take."""
        before = sum(lead[:chunk])
        kinds = self.costs.kind_of[before : before + (lead[chunk] if chunk < len(lead) else 0)]
        return float(sum(self.costs.layer_s[kind, 0] for kind in kinds))

    def _least_again(self, stage: int, sizes: tuple[int, ...], lead: tuple[int, ...]) -> int | None:
        """The least r with which a stage is within memory; None where none is enough."""
        costs, before = self.costs, sum(lead[:stage])
        others = costs.kind_of[before : before + (lead[stage] if stage < len(lead) else 0)]
        if not sum(sizes) + len(others):  # another bound knows what an end alone needs
            return 0
        needed = costs.base_bytes[stage, 0] + sum(sizes) * costs.layer_bytes[stage, self.main, 0]
        needed += sum(costs.layer_bytes[stage, kind, 0] - costs.saved_bytes[stage, kind, 0] for kind in others)
        lacking = needed - self.memory_bytes * (1.0 + ROUNDING)
        saved = costs.saved_bytes[stage, self.main, 0]
        for again in range(min(max(sizes), self._longest) + 1):
            if lacking <= sum(min(size, again) for size in sizes) * saved:
                return again
        return None

    def _timed(self, options: Sequence[_Option], lead: tuple[int, ...], again: int) -> list[_Option]:
        """The options that r layers recomputed keep within memory, with the time of that."""
        again_s = float(self.costs.again_s[self.main, 0])
        timed = []
        for one in options:
            if one.again <= again:
                counts = np.minimum(one.sizes, again)
                timed.append(one._replace(backward_s=one.backward_s + counts * again_s))
        return timed


@dataclass(frozen=True, slots=True)
class _Part:
    """All splits of a candidate with the same layers of other kinds on the first chunks, and the same r.

    Args:
        candidate: the candidate.
        lead: layers of other kinds on each of the first chunks.
        again: r.
        stages: options of each stage.
    """

    candidate: _Candidate
    lead: tuple[int, ...]
    again: int
    stages: Sequence[Sequence[_Option]]

    def solve(self) -> tuple[list[Leaf], float]:
        """Leaves whose pipeline may take less than is of use, by what it takes; no other split takes less than …"""
        counts, least_s = self._open_counts()
        if counts is None:
            return [], -np.inf
        if not counts.shape[1]:
            return [], np.inf
        if self.candidate.split.virtual_pipeline_stages == 1:
            found = zip(counts.T.tolist(), least_s.tolist(), strict=True)
            return [Leaf(self._sizes([(count,) for count in one]), seconds) for one, seconds in found], np.inf
        alike = [] if self.lead else self._alike(counts, least_s)
        leaves = self._leaves(counts)
        return (alike, float(least_s.min())) if leaves is None else (alike + leaves, np.inf)

    # --- stages -------------------------------------------------------------------------------------------------------

    def _open_counts(self) -> tuple[IntArray | None, FloatArray]:
        """Layers of each stage, [p, N], whose closed form may be of use, and what it says, [N]; None: too many."""
        one, p = self.candidate, len(self.stages)
        most = max((sum(option.sizes) for options in self.stages for option in options), default=0)
        seconds, forward = np.full((p, most + 1), np.inf), np.zeros((p, most + 1))
        needs = np.zeros(seconds.shape, dtype=bool)  # some option with this many layers needs r
        for stage, options in enumerate(self.stages):
            for option in options:
                count, ahead = sum(option.sizes), option.forward_s.sum()
                needs[stage, count] |= option.again == self.again
                seconds[stage, count] = min(seconds[stage, count], ahead + option.backward_s.sum())
                forward[stage, count] = ahead
        limit_s = one.most_s / one.m
        counts = compositions(seconds, limit_s, first=0, fewest=[0] * p, layers=one.layers, most_found=MOST_COUNTS)
        if counts is None:
            return None, np.zeros(0)
        at = np.arange(p)[:, None], counts
        counts = counts[:, needs[at].any(axis=0)]
        at = np.arange(p)[:, None], counts
        pipeline_s = staged_pipeline_s(
            one.split.schedule,
            virtual_pipeline_stages=one.split.virtual_pipeline_stages,
            num_microbatches=np.full(counts.shape[1], one.m),
            stages_s=seconds[at],
            forward_share=forward[at] / seconds[at],
        )
        is_open = pipeline_s < one.most_s
        return counts[:, is_open], pipeline_s[is_open]

    def _alike(self, counts: IntArray, least_s: FloatArray) -> list[Leaf]:
        """Splits whose chunks are alike on each stage, of which the closed form counts alone."""
        v = self.candidate.split.virtual_pipeline_stages
        even = np.flatnonzero((counts % v == 0).all(axis=0))
        return [Leaf(self._sizes([(count // v,) * v for count in counts[:, i]]), float(least_s[i])) for i in even]

    # --- chunks -------------------------------------------------------------------------------------------------------

    def _leaves(self, counts: IntArray) -> list[Leaf] | None:
        """The leaves of the tree that may be of use; None where a level has too many nodes."""
        lowest = self._lowest(counts)
        nodes, family = np.zeros((0, 1), dtype=np.int64), np.zeros(1, dtype=np.int64)  # options, [s, N]; counts so far
        known, seconds = np.zeros(counts.shape[1], dtype=np.int64), np.zeros(1)
        for stage, options in enumerate(self.stages):
            _, first, after = np.unique(counts[: stage + 1], axis=1, return_index=True, return_inverse=True)
            grown, families = [], []
            for number, column in enumerate(first.tolist()):
                parents = np.flatnonzero(family == known[column])
                for index, option in enumerate(options):
                    if sum(option.sizes) == counts[stage, column]:
                        grown.append(np.vstack([nodes[:, parents], np.full(len(parents), index)]))
                        families.append(np.full(len(parents), number))
            nodes, family, known = np.hstack(grown), np.concatenate(families), after.reshape(-1)
            if nodes.shape[1] > MOST_NODES:
                return None
            seconds = self._least_s(nodes, lowest)
            keep = seconds < self.candidate.most_s
            nodes, family, seconds = nodes[:, keep], family[keep], seconds[keep]
            if not len(family):
                return []
        return [
            Leaf(self._sizes([options[i].sizes for options, i in zip(self.stages, node, strict=True)]), least_s)
            for node, least_s in zip(nodes.T.tolist(), seconds.tolist(), strict=True)
        ]

    def _lowest(self, counts: IntArray) -> tuple[FloatArray, FloatArray]:
        """f and b of each chunk at least, whatever its stage holds, [v, p] each."""
        possible = [
            [option for option in options if sum(option.sizes) in held]
            for options, held in zip(self.stages, map(set, counts.tolist()), strict=True)
        ]
        forward = [np.min([option.forward_s for option in options], axis=0) for options in possible]
        backward = [np.min([option.backward_s for option in options], axis=0) for options in possible]
        return np.stack(forward, axis=1), np.stack(backward, axis=1)

    def _least_s(self, nodes: IntArray, lowest: tuple[FloatArray, FloatArray]) -> FloatArray:
        """Bound of the pipeline under each node, [N]."""
        forward, backward = (np.repeat(own[..., None], nodes.shape[1], axis=2) for own in lowest)
        for stage, chosen in enumerate(nodes):
            forward[:, stage] = np.stack([option.forward_s for option in self.stages[stage]], axis=1)[:, chosen]
            backward[:, stage] = np.stack([option.backward_s for option in self.stages[stage]], axis=1)[:, chosen]
        return unlike_chunks_s(forward, backward, np.full(nodes.shape[1], self.candidate.m), least=True)

    def _sizes(self, held: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """All layers of each chunk, from those of the main kind on the chunks of each stage."""
        sizes = np.array(held).T.reshape(-1)
        sizes[: len(self.lead)] += np.array(self.lead, dtype=sizes.dtype)
        return tuple(sizes.tolist())


def _compositions(count: int, fewest: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to lay layers on chunks, each of which holds so many at least.

    >>> list(_compositions(3, [0, 1]))
    [(0, 3), (1, 2), (2, 1)]
    """
    if len(fewest) == 1:
        yield (count,)
        return
    for first in range(fewest[0], count - sum(fewest[1:]) + 1):
        yield from ((first, *rest) for rest in _compositions(count - first, fewest[1:]))
