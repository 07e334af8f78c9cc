"""What no split of a candidate's layers beats: all numbers of layers of the stages, then all chunks of those.

The dynamic programme (:mod:`.recurrence`) knows how long a stage takes, not what its chunks make others wait, and of
the bubble of interleaved 1F1B only what is before a stage. This is for the few candidates that it leaves open.

*Notation.* As in :mod:`.uneven`. The first r layers of each chunk are recomputed. Stage i may hold the *options* o: x_1
… x_v layers of the main kind on its chunks, n = Σ x, that stay within memory with r. On chunk c an option takes

    f_c = φ·(x_c·τ + e_c)      b_c = (1 − φ)·(x_c·τ + e_c) + min(x_c, max(r − l_c, 0))·ρ

with τ seconds of a layer, ρ of its recompute, φ the forward share, e_c what embedding, LM head and the l_c layers of
other kinds take that lead the model; in which ways these lie on the first chunks says :mod:`.mixed_kinds`.

*Stages.* All n_1 … n_p with Σ n = L whose stages take less, by their quickest option, than the best step leaves them
(:func:`~.compositions.compositions`). Each has a bound: the closed form of the pipeline for these times. Where layers
are of one kind, options are made only of those n that :mod:`.by_counts` leaves: stages of ten chunks have few such.

*Sifting.* An option is out if the pipeline takes too long with it where all other stages take, on each chunk, the least
of any of their options; what is left takes more at least, and is sifted again. Options of alike chunks stay.

*Chunks.* Of what is left, a tree over the stages, those of fewest options first, breadth first. A node holds an option
of each of the first stages; the later ones take, on each chunk, the least of any option. Its bound is the recurrence
over slots for these times (:func:`~meshplan.planner.training.pipeline.unlike_chunks.unlike_chunks_s`, ``least``). A
stage of unlike chunks makes its neighbours wait whatever the others hold: of 16 stages of (2, 2) layers and 64
micro-batches, one with (1, 3) costs 4 to 20 % of the pipeline's time, so that few nodes are left on each level.

*Proof.* The pipeline is priced as the larger of both, of which the closed form alone counts where all chunks of each
stage are alike. Both grow with each f and b: the closed form is a maximum of sums with weights of 0 or more of such
maxima, the recurrence a longest path. A plan of the candidate is a leaf, that of its split and of the least r
within memory: its chunks take what their options say or more, as leading layers are recomputed for nothing and keep
what recompute leaves, and recompute saves the most that a layer can save. A node takes no more than any leaf below it.
So no plan beats A and the least leaf, nor, of what is cut, the step at which it was.

Assumes: layers of other kinds lead the model; no transfers of ZeRO-3, which are no sum over chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import NamedTuple

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.pipeline.closed_forms import staged_pipeline_s
from meshplan.planner.training.pipeline.unlike_chunks import GROUPS, unlike_chunks_s
from meshplan.planner.training.search.layers.by_counts import held_by_stages
from meshplan.planner.training.search.layers.compositions import compositions
from meshplan.planner.training.search.layers.mixed_kinds import MOST_LEADING, first_chunks
from meshplan.planner.training.search.layers.recurrence import AHEAD
from meshplan.planner.training.search.layers.uneven import UnevenSplits
from meshplan.planner.training.search.memory_savers import takes_whole_chunks

# At most: options of a stage, numbers of layers of all stages, passes of micro-batches through chunks in all nodes of a
# tree (a second or two), and leaves that are returned. Stages of many layers and chunks have millions of options (20
# layers on 10 chunks), and no bound then.
MOST_OPTIONS, MOST_COUNTS, MOST_PASSES, MOST_LEAVES = 1_000, 20_000, 60_000_000, 64
# Times that options are sifted: each makes what the others hold at least a little longer.
MOST_SIFTED = 3
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
    """Layers of the main kind on each chunk of a stage; f and b of the chunks, [v] each; the least r within memory."""

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
    try:
        for part in candidate.parts():
            leaves, part_s = part.solve()
            beyond_s = min(beyond_s, part_s)
            for sizes, least_s in leaves:
                least[sizes] = min(least.get(sizes, np.inf), least_s)
    except _TooManyError:
        return Closed([], -np.inf)
    leaves = [Leaf(sizes, (least_s + outside_s) * (1.0 - ROUNDING)) for sizes, least_s in least.items()]
    leaves.sort(key=lambda leaf: (leaf.least_s, leaf.sizes))
    beyond = [(beyond_s + outside_s) * (1.0 - ROUNDING), *(leaf.least_s for leaf in leaves[MOST_LEAVES:])]
    return Closed(leaves[:MOST_LEAVES], min(most_s, *beyond))


class _TooManyError(Exception):
    """A stage has more options than can be looked at."""


class _Others(NamedTuple):
    """Kinds of the layers that lead the model on the first chunk of a stage; whether more follow on the next stage."""

    kinds: tuple[int, ...] = ()
    more_follow: bool = False


class _Candidate:
    """What the stages of one candidate may hold.

    Args:
        splits: the candidate.
        most_s: pipelines that take no less are of no use.
    """

    def __init__(self, splits: UnevenSplits, most_s: float) -> None:
        self.split, self.most_s = splits.split, most_s
        self.m = int(splits.batch.num_microbatches[0])
        self._costs = splits.stages.costs()
        self._memory_bytes = splits.problem.limits.memory_bytes
        self._share = float(splits.model.forward_share[0])
        self._main = self._costs.kind_of[-1]
        self.layers = self._costs.kind_of.count(self._main)
        self._most_again = self.layers - 1 + takes_whole_chunks(splits.problem)
        self._held = held_by_stages(splits, most_s)
        self._known: dict[tuple[int, _Others, int | None], list[_Option]] = {}  # most ways share most stages

    def parts(self) -> Iterator[_Part]:
        """A search for each way in which other kinds lie on the first chunks, and each number r that is the least."""
        kinds = self._costs.kind_of[: -self.layers]
        for lead in first_chunks(len(kinds)) if kinds else ((),):
            ends = np.cumsum((0, *lead)).tolist()
            first = [_Others(kinds[begin:end], end < len(kinds)) for begin, end in itertools.pairwise(ends)]
            others = first + [_Others()] * (self.split.pipeline_parallel - len(first))
            options = [self._options(stage, own) for stage, own in enumerate(others)]
            for again in sorted({one.again for own in options for one in own}):
                timed = [self._options(stage, own, again) for stage, own in enumerate(others)]
                yield _Part(self, lead, again, timed)

    def _options(self, stage: int, others: _Others, again: int | None = None) -> list[_Option]:
        """What a stage may hold by itself in time and memory, without recompute; or with ``again`` layers of a chunk.

        Of what is recomputed the main kind counts, which follows the other kinds on its chunk.
        """
        if (stage, others, again) not in self._known:
            if again is None:
                found = list(self._possible(stage, others))
            else:
                inside = np.full(self.split.virtual_pipeline_stages, again)
                inside[0] = max(again - len(others.kinds), 0)
                more_s = float(self._costs.again_s[self._main, 0])
                found = [
                    one._replace(backward_s=one.backward_s + np.minimum(one.sizes, inside) * more_s)
                    for one in self._options(stage, others)
                    if one.again <= again
                ]
            self._known[stage, others, again] = found
        return self._known[stage, others, again]

    def _possible(self, stage: int, others: _Others) -> Iterator[_Option]:
        costs, split = self._costs, self.split
        p, v = split.pipeline_parallel, split.virtual_pipeline_stages
        ends = () if split.vocabulary_parallel else (0, p * v - 1)
        fewest = [int(chunk not in ends) for chunk in range(stage, p * v, p)]
        around_s = np.zeros(v)
        if split.vocabulary_parallel:
            around_s += costs.base_s[stage, 0] / v
        else:  # the embedding is on the first chunk, the head on the last one
            around_s[0 if stage == 0 else -1] += costs.base_s[stage, 0]
        around_s[0] += sum(float(costs.layer_s[kind, 0]) for kind in others.kinds)
        fewest[0] = 0 if others.kinds else fewest[0]
        layer_s = float(costs.layer_s[self._main, 0])
        most = min(int((self.most_s / self.m - around_s.sum()) / layer_s * (1.0 + ROUNDING)), self.layers)
        held = range(sum(fewest), most + 1)
        counts = held if self._held is None else sorted(self._held[stage].intersection(held))
        if sum(comb(count - sum(fewest) + v - 1, v - 1) for count in counts) > MOST_OPTIONS:
            raise _TooManyError
        for count in counts:
            for sizes in _compositions(count, fewest):
                if others.more_follow and sizes[0]:
                    continue
                least = self._least_again(stage, sizes, others)
                if least is not None:
                    plain = np.array(sizes) * layer_s + around_s
                    yield _Option(sizes, self._share * plain, (1.0 - self._share) * plain, least)

    def _least_again(self, stage: int, sizes: tuple[int, ...], others: _Others) -> int | None:
        """The least r with which a stage is within memory; None where none is enough."""
        costs, count = self._costs, sum(sizes)
        if not count + len(others.kinds):  # another bound knows what an end alone needs
            return 0
        needed = costs.base_bytes[stage, 0] + count * costs.layer_bytes[stage, self._main, 0]
        needed += sum(costs.layer_bytes[stage, kind, 0] - costs.saved_bytes[stage, kind, 0] for kind in others.kinds)
        lacking = needed - self._memory_bytes * (1.0 + ROUNDING)
        saved = costs.saved_bytes[stage, self._main, 0]
        longest = max(sizes) + len(others.kinds)
        for again in range(min(longest, self._most_again) + 1):
            if lacking <= sum(min(size, again) for size in sizes) * saved:
                return again
        return None


@dataclass(frozen=True, slots=True)
class _Part:
    """All splits of a candidate with the same layers of other kinds on the first chunks, and the same r.

    Args:
        candidate: the candidate.
        lead: layers of other kinds on each of the first chunks.
        again: r.
        stages: options of each stage.
        sifts: times that they are still sifted, at most.
    """

    candidate: _Candidate
    lead: tuple[int, ...]
    again: int
    stages: Sequence[Sequence[_Option]]
    sifts: int = MOST_SIFTED

    def solve(self) -> tuple[list[Leaf], float]:
        """Leaves of which a pipeline may be of use, with what it takes; and what that of any other split takes.

        Infinite where no other split is of use, −∞ where there are too many to tell.
        """
        counts, least_s = self._open_counts()
        if counts is None:
            return [], -np.inf
        if not counts.shape[1]:
            return [], np.inf
        sifted = self._sifted(counts) if self.sifts and self.candidate.split.virtual_pipeline_stages > 1 else None
        if sifted is not None:
            return sifted.solve()
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

    def _sifted(self, counts: IntArray) -> _Part | None:
        """The same without the options that take too long whatever the other stages hold; None where there are none."""
        lowest, held = self._lowest(counts), [set(own) for own in counts.tolist()]
        asked = [
            (stage, index)
            for stage, options in enumerate(self.stages)
            for index, option in enumerate(options)
            if sum(option.sizes) in held[stage]
        ]
        forward, backward = (np.repeat(own[..., None], len(asked), axis=2) for own in lowest)
        for column, (stage, index) in enumerate(asked):
            forward[:, stage, column] = self.stages[stage][index].forward_s
            backward[:, stage, column] = self.stages[stage][index].backward_s
        seconds = unlike_chunks_s(forward, backward, np.full(len(asked), self.candidate.m), least=True)
        left: list[list[_Option]] = [[] for _ in self.stages]
        for (stage, index), least_s in zip(asked, seconds.tolist(), strict=True):
            option = self.stages[stage][index]
            if least_s < self.candidate.most_s or len(set(option.sizes)) == 1:  # the closed form alone counts then
                left[stage].append(option)
        if sum(map(len, left)) == len(asked):
            return None
        return replace(self, stages=left, sifts=self.sifts - 1)

    def _leaves(self, counts: IntArray) -> list[Leaf] | None:
        """The leaves of the tree that may be of use; None where it is too large.

        Stages of which fewest options are left come first.
        """
        lowest, order = self._lowest(counts), np.argsort([len(options) for options in self.stages], kind="stable")
        nodes, family = np.zeros((0, 1), dtype=np.int64), np.zeros(1, dtype=np.int64)  # options, [s, N]; counts so far
        known, seconds, looked = np.zeros(counts.shape[1], dtype=np.int64), np.zeros(1), 0
        chunks = len(order) * self.candidate.split.virtual_pipeline_stages
        passes = min(self.candidate.m, GROUPS * len(order)) * chunks
        for place, stage in enumerate(order.tolist()):
            _, first, after = np.unique(counts[order[: place + 1]], axis=1, return_index=True, return_inverse=True)
            grown, families = [np.zeros((place + 1, 0), dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
            for number, column in enumerate(first.tolist()):
                parents = np.flatnonzero(family == known[column])
                for index, option in enumerate(self.stages[stage]):
                    if sum(option.sizes) == counts[stage, column]:
                        grown.append(np.vstack([nodes[:, parents], np.full(len(parents), index)]))
                        families.append(np.full(len(parents), number))
            nodes, family, known = np.hstack(grown), np.concatenate(families), after.reshape(-1)
            looked += nodes.shape[1] * passes
            if looked > MOST_PASSES:
                return None
            seconds = self._least_s(nodes, order, lowest)
            keep = seconds < self.candidate.most_s
            nodes, family, seconds = nodes[:, keep], family[keep], seconds[keep]
            if not len(family):
                return []
        nodes = nodes[np.argsort(order)]
        return [
            Leaf(self._sizes([options[i].sizes for options, i in zip(self.stages, node, strict=True)]), least_s)
            for node, least_s in zip(nodes.T.tolist(), seconds.tolist(), strict=True)
        ]

    def _lowest(self, counts: IntArray) -> tuple[FloatArray, FloatArray]:
        """Times f and b of each chunk at least, whatever its stage holds, [v, p] each."""
        possible = [
            [option for option in options if sum(option.sizes) in held]
            for options, held in zip(self.stages, map(set, counts.tolist()), strict=True)
        ]
        forward = [np.min([option.forward_s for option in options], axis=0) for options in possible]
        backward = [np.min([option.backward_s for option in options], axis=0) for options in possible]
        return np.stack(forward, axis=1), np.stack(backward, axis=1)

    def _least_s(self, nodes: IntArray, order: IntArray, lowest: tuple[FloatArray, FloatArray]) -> FloatArray:
        """Bound of the pipeline under each node, [N]: an option of each of the first stages of an order."""
        forward, backward = (np.repeat(own[..., None], nodes.shape[1], axis=2) for own in lowest)
        for stage, chosen in zip(order.tolist(), nodes, strict=False):
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
