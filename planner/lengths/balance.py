"""Documents dealt out so that ranks and micro-batches have equal work.

*Notation.* Document i has work w_i and l_i tokens. R data-parallel ranks run m micro-batches each through p pipeline
stages; W = Σ w_i, n = R·m.

*Objective.* With t_j the micro-batches of a rank, it takes at least its pipeline's first stage all of them, and its
longest micro-batch through all stages and back:

    T = max over ranks of Σ_j t_j + (p − 1)·max_j t_j

the time of a pipeline that runs its micro-batches in order of size (:mod:`meshplan.planner.training.pipeline.uneven`).

*Bound.* Some rank has at least W/R, and its longest micro-batch at least W/n; the longest document is in some
micro-batch; of the n + 1 longest documents two share one:

    T ≥ max(W/R + (p − 1)·W/n, p·w₁, p·(w_n + w_{n+1}))          w descending

*Method.* Longest processing time first (Graham 1969): documents by falling work, each to the rank with the least, there
to the micro-batch with the least that still has room for its tokens. Then documents move from the longest micro-batch,
or change places with smaller ones, while that makes it shorter; what T was before stays where it was less.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

# Moves out of the longest micro-batch that are tried at most.
MOST_MOVES = 64
# Differences between micro-batches below this share of the mean are left.
EVEN_ENOUGH = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Which document is in which micro-batch of which data-parallel rank.

    Args:
        ranks: for each rank its micro-batches in the order in which they run; each names documents by their index.
        work_s: seconds of each micro-batch on one stage, [ranks, micro-batches].
        seconds: T of the module's text.
        bound_s: no assignment takes less.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    work_s: FloatArray
    seconds: float
    bound_s: float

    @property
    def imbalance(self) -> float:
        """The longest micro-batch over the mean (WLB-LLM's imbalance degree); 1 is balanced."""
        return float(self.work_s.max() / self.work_s.mean())

    @property
    def gap(self) -> float:
        """How much shorter another assignment may be at most, as a share of this one."""
        return max(self.seconds - self.bound_s, 0.0) / self.seconds


def pipeline_least_s(work_s: FloatArray, pipeline_parallel: int) -> float:
    """T of the module's text. Args: seconds of each micro-batch [ranks, micro-batches]; stages p."""
    ranks = work_s.sum(axis=-1) + (pipeline_parallel - 1) * work_s.max(axis=-1)
    return float(ranks.max())


def least_s(work: FloatArray, *, ranks: int, micro_batches: int, pipeline_parallel: int, fixed_s: float = 0.0) -> float:
    """The bound of the module's text.

    Args:
        work: seconds of each document.
        ranks: R.
        micro_batches: m of each rank.
        pipeline_parallel: p.
        fixed_s: seconds of a micro-batch beside its documents'.
    """
    count, p = ranks * micro_batches, pipeline_parallel
    mean = float(work.sum()) / count + fixed_s
    longest = np.sort(work)[::-1]
    bounds = [mean * (micro_batches + p - 1), p * (float(longest[0]) + fixed_s)]
    if len(work) > count:
        bounds.append(p * (float(longest[count - 1] + longest[count]) + fixed_s))
    return max(bounds)


def balanced(
    work: FloatArray,
    tokens: IntArray,
    *,
    ranks: int,
    micro_batches: int,
    pipeline_parallel: int = 1,
    most_tokens: int | None = None,
    fixed_s: float = 0.0,
) -> Assignment:
    """An assignment of every document; see the module's text.

    Args:
        work: seconds of each document on one stage, [documents].
        tokens: of each document.
        ranks: data-parallel ranks R.
        micro_batches: m of each rank.
        pipeline_parallel: stages p.
        most_tokens: of one micro-batch; None for no limit.
        fixed_s: seconds of a micro-batch beside its documents'.

    Raises:
        ValueError: the documents do not fit into so many micro-batches, found so far as longest-first places them.
    """
    deal = _Deal(work, tokens, ranks, micro_batches, most_tokens)
    deal.longest_first()
    first, inside = deal.work.copy(), [[[*micro] for micro in rank] for rank in deal.inside]
    deal.improve()
    if pipeline_least_s(deal.work, pipeline_parallel) > pipeline_least_s(first, pipeline_parallel):
        deal.work, deal.inside = first, inside
    order = np.argsort(deal.work, axis=1, kind="stable")
    seconds = np.take_along_axis(deal.work, order, axis=1) + fixed_s
    found = tuple(tuple(tuple(deal.inside[rank][micro]) for micro in order[rank].tolist()) for rank in range(ranks))
    bound = least_s(
        deal.all_work, ranks=ranks, micro_batches=micro_batches, pipeline_parallel=pipeline_parallel, fixed_s=fixed_s
    )
    return Assignment(ranks=found, work_s=seconds, seconds=pipeline_least_s(seconds, pipeline_parallel), bound_s=bound)


class _Deal:
    """Documents in micro-batches while they are dealt out."""

    def __init__(
        self, work: FloatArray, tokens: IntArray, ranks: int, micro_batches: int, most_tokens: int | None
    ) -> None:
        self.all_work = np.asarray(work, dtype=np.float64)
        self.tokens: list[int] = np.asarray(tokens).tolist()
        self.most = most_tokens
        self.micro_batches = micro_batches
        self.work = np.zeros((ranks, micro_batches))
        self.filled = [[0] * micro_batches for _ in range(ranks)]
        self.inside: list[list[list[int]]] = [[[] for _ in range(micro_batches)] for _ in range(ranks)]

    def longest_first(self) -> None:
        """Every document to the rank with the least work, there to the micro-batch with the least that has room."""
        work: list[float] = self.all_work.tolist()
        most = float("inf") if self.most is None else self.most
        ranks = [(0.0, rank) for rank in range(len(self.inside))]
        micros = [[(0.0, micro) for micro in range(self.micro_batches)] for _ in ranks]
        for document in np.argsort(-self.all_work, kind="stable").tolist():
            seconds, room = work[document], most - self.tokens[document]
            rank = ranks[0][1]
            micro = micros[rank][0][1]
            if self.filled[rank][micro] <= room:
                heapq.heapreplace(ranks, (ranks[0][0] + seconds, rank))
                heapq.heapreplace(micros[rank], (micros[rank][0][0] + seconds, micro))
            else:
                rank, micro = self._with_room(ranks, micros, document, room)
                _add(ranks, rank, seconds)
                _add(micros[rank], micro, seconds)
            self.filled[rank][micro] += self.tokens[document]
            self.inside[rank][micro].append(document)
        for rank, row in enumerate(micros):
            for seconds, micro in row:
                self.work[rank, micro] = seconds

    def _with_room(
        self, ranks: list[tuple[float, int]], micros: list[list[tuple[float, int]]], document: int, room: float
    ) -> tuple[int, int]:
        """The micro-batch with the least work that has room, on the rank with the least work that has such a one."""
        for _, rank in sorted(ranks):
            for _, micro in sorted(micros[rank]):
                if self.filled[rank][micro] <= room:
                    return rank, micro
        total, count = sum(self.tokens), len(self.inside) * self.micro_batches
        raise ValueError(
            f"a document of {self.tokens[document]} tokens finds no room: {total} tokens in {count} micro-batches of "
            f"at most {room + self.tokens[document]:.0f}; give fewer documents, or more room"
        )

    def improve(self) -> None:
        """Moves and exchanges out of the longest micro-batch, while one makes it shorter."""
        for _ in range(MOST_MOVES):
            if not self._shorten():
                return

    def _shorten(self) -> bool:
        """One exchange between the longest micro-batch and the shortest; whether there was one."""
        flat = self.work.ravel()
        longest, shortest = (
            divmod(int(flat.argmax()), self.micro_batches),
            divmod(int(flat.argmin()), self.micro_batches),
        )
        excess = self.work[longest] - self.work[shortest]
        if excess <= EVEN_ENOUGH * flat.mean():
            return False
        if longest[0] != shortest[0] and self.work[longest[0]].sum() < self.work[shortest[0]].sum():
            return False
        giving, taking = self._at(longest), self._at(shortest)
        given = self.all_work[giving]
        taken = np.concatenate([[0.0], self.all_work[taking]])
        moved = given[:, None] - taken[None, :]
        better = np.where((moved > 0.0) & (moved < excess), np.abs(moved - excess / 2.0), np.inf)
        self._mask_full(better, giving, taking, longest, shortest)
        if not np.isfinite(better).any():
            return False
        row, column = divmod(int(better.argmin()), better.shape[1])
        if moved[row, column] < excess * 1e-6:
            return False
        self._exchange(longest, shortest, giving[row], taking[column - 1] if column else None)
        return True

    def _at(self, place: tuple[int, int]) -> list[int]:
        return self.inside[place[0]][place[1]]

    def _mask_full(
        self,
        better: FloatArray,
        giving: list[int],
        taking: list[int],
        longest: tuple[int, int],
        shortest: tuple[int, int],
    ) -> None:
        """Exchanges that leave either micro-batch with too many tokens are ruled out."""
        if self.most is None:
            return
        lengths = np.array([self.tokens[document] for document in giving])
        others = np.array([0, *(self.tokens[document] for document in taking)])
        grows = lengths[:, None] - others[None, :]
        full = self.filled[shortest[0]][shortest[1]] + grows > self.most
        full |= self.filled[longest[0]][longest[1]] - grows > self.most
        better[full] = np.inf

    def _exchange(self, longest: tuple[int, int], shortest: tuple[int, int], given: int, taken: int | None) -> None:
        for document, source, sink in ((given, longest, shortest), (taken, shortest, longest)):
            if document is None:
                continue
            self._at(source).remove(document)
            self._at(sink).append(document)
            for place, sign in ((source, -1), (sink, 1)):
                self.work[place] += sign * self.all_work[document]
                self.filled[place[0]][place[1]] += sign * self.tokens[document]


def _add(heap: list[tuple[float, int]], name: int, seconds: float) -> None:
    """More work for an entry that is not on top of its heap."""
    place = next(place for place, entry in enumerate(heap) if entry[1] == name)
    heap[place] = (heap[place][0] + seconds, name)
    heapq.heapify(heap)
