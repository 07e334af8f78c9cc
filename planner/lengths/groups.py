"""Context-parallel groups by length: which sizes a step's groups have, and which documents go to which.

A long document needs many ranks to fit; a short one is split over many ranks for nothing (FlexSP, arXiv:2412.01523;
ByteScale, arXiv:2502.21231). The ranks that a static plan arranges as data × context parallelism are rearranged for
each step.

*Notation.* G ranks; a partition P of G into groups of sizes c (powers of two); document i takes t_i(c) on each rank of
a group of c and l_i/c of its tokens' room; a rank holds M tokens of a micro-batch, and runs at most k micro-batches.

*Objective.* The longest group: T = min over P and assignments of max_g Σ_{i in g} t_i(c_g), with l_i ≤ M·c_g for every
document and Σ_{i in g} l_i ≤ k·M·c_g for all of a group.

*Bound.* Ranks are busy c·t_i(c) for a document, so that T ≥ Σ_i min_c c·t_i(c) / G and T ≥ max_i min_c t_i(c), the
minima over the sizes in P whose groups hold the document; the least of all P bounds every answer.

*Method.* Of up to 8 ranks every partition, by its bound; of more, from the groups of equal size by splitting a group
or merging two while that is shorter. A partition takes documents by falling work, each to the group that ends first
with it; then documents move out of the longest group, or change places. Few documents on few ranks are searched
exhaustively.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

# Ranks up to which every partition is looked at.
MOST_ENUMERATED = 8
# Documents × groups whose assignments are all looked at (branch and bound).
EXACT_DOCUMENTS, EXACT_RANKS = 10, 8
_MOVES = 100
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedGroups:
    """Groups of one step.

    Args:
        sizes: ranks of each group, largest first.
        documents: indices of the documents of each group.
        seconds: of the longest group.
        bound_s: no groups take less.
    """

    sizes: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """How much shorter others may be at most, as a share of this."""
        return max(self.seconds - self.bound_s, 0.0) / self.seconds


@dataclass(frozen=True, kw_only=True)
class GroupQuestion:
    """What one step's groups are chosen for.

    Args:
        seconds: size c → t_i(c) of every document; the sizes that groups may have.
        tokens: of every document.
        ranks: G.
        most_tokens: M, of one micro-batch on one rank.
        micro_batches: k, one after another on a rank; None for as many as it takes.
    """

    seconds: Mapping[int, FloatArray]
    tokens: IntArray
    ranks: int
    most_tokens: int
    micro_batches: int | None = 1

    def room(self, sizes: Sequence[int]) -> FloatArray:
        """Tokens that each of some groups has room for."""
        whole = np.inf if self.micro_batches is None else float(self.micro_batches * self.most_tokens)
        return whole * np.array(sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that a group may have, largest first."""
        return tuple(sorted((size for size in self.seconds if size <= self.ranks), reverse=True))

    def allowed_s(self, size: int) -> FloatArray:
        """t_i(c), infinite where a group of c does not hold the document."""
        return np.where(self.tokens <= self.most_tokens * size, self.seconds[size], np.inf)

    def least_s(self, sizes: Sequence[int], counts: Sequence[int] | None = None) -> float:
        """The bound of the module's text, for partitions with groups of these sizes."""
        table = np.stack([self.allowed_s(size) for size in sizes])
        busy = (table * np.array(sizes)[:, None]).min(axis=0).sum() / self.ranks
        return float(max(busy, table.min(axis=0).max()))


@cache
def partitions(ranks: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every multiset of sizes with that sum, largest size first.

    >>> partitions(4, (4, 2, 1))
    ((4,), (2, 2), (2, 1, 1), (1, 1, 1, 1))
    """

    def with_most(left: int, most: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield ()
        for size in sizes[most:]:
            if size <= left:
                for rest in with_most(left - size, sizes.index(size)):
                    yield (size, *rest)

    return tuple(with_most(ranks, 0))


def mixed_groups(question: GroupQuestion, *, static_size: int) -> MixedGroups | None:
    """The best groups found; None where a document fits no group, or all together do not.

    Args:
        question: see :class:`GroupQuestion`.
        static_size: of the static plan's groups, which are among those looked at.
    """
    sizes = question.sizes
    uniform = (static_size,) * (question.ranks // static_size)
    if question.ranks <= MOST_ENUMERATED:
        found = sorted((question.least_s(sorted(set(one))), one) for one in partitions(question.ranks, sizes))
        bound = found[0][0]
        best = _best_of(question, [(0.0, uniform), *found])
    else:
        bound = question.least_s(sizes)
        best = _neighbourhood(question, uniform)
    if best is None:
        return None
    seconds, chosen, groups = best
    return MixedGroups(sizes=chosen, documents=groups, seconds=seconds, bound_s=min(bound, seconds))


_Found = tuple[float, tuple[int, ...], tuple[tuple[int, ...], ...]]


def _best_of(question: GroupQuestion, ranked: Sequence[tuple[float, tuple[int, ...]]]) -> _Found | None:
    """The best assignment over partitions, by rising bound, until no bound is below the best."""
    best: _Found | None = None
    for least, sizes in ranked:
        if best is not None and least >= best[0]:
            break
        own = _assigned(question, sizes, np.inf if best is None else best[0])
        if own is not None and (best is None or own[0] < best[0]):
            best = (own[0], sizes, own[1])
    return best


def _neighbourhood(question: GroupQuestion, uniform: tuple[int, ...]) -> _Found | None:
    """From groups of equal size, splitting a group or merging two while that is shorter."""
    starts = {uniform, *((size,) * (question.ranks // size) for size in question.sizes)}
    quick = {one: _quick_s(question, one) for one in starts if sum(one) == question.ranks}
    chosen = min(quick, key=lambda one: (quick[one], one))
    while True:
        near = {one: _quick_s(question, one) for one in _near(chosen, question.sizes)}
        other = min(near, key=lambda one: (near[one], one), default=chosen)
        if other == chosen or near[other] >= min(quick[chosen], np.inf) * (1.0 - _TOLERANCE):
            break
        chosen, quick = other, near
    return _best_of(question, [(0.0, uniform), (0.0, chosen)])


def _quick_s(question: GroupQuestion, sizes: tuple[int, ...]) -> float:
    """The longest group of a partition as longest-first fills it; infinite where documents do not fit."""
    table, room = _table(question, sizes)
    place = _longest_first(table, question.tokens, room)
    return np.inf if place is None else _longest_s(table, place)


def _table(question: GroupQuestion, sizes: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """Seconds of every document in every group, [documents, groups], and the tokens that each group has room for."""
    columns = {size: question.allowed_s(size) for size in set(sizes)}
    return np.stack([columns[size] for size in sizes], axis=1), question.room(sizes)


def _near(sizes: tuple[int, ...], allowed: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Partitions with one group split in two, or two equal groups merged."""
    for size in dict.fromkeys(sizes):
        rest = list(sizes)
        rest.remove(size)
        if size % 2 == 0 and size // 2 in allowed:
            yield tuple(sorted([*rest, size // 2, size // 2], reverse=True))
        if size in rest and 2 * size in allowed:
            rest.remove(size)
            yield tuple(sorted([*rest, 2 * size], reverse=True))


def _assigned(
    question: GroupQuestion, sizes: tuple[int, ...], limit_s: float
) -> tuple[float, tuple[tuple[int, ...], ...]] | None:
    """Documents in the groups of one partition, and the longest group; None where they do not fit."""
    table, room = _table(question, sizes)
    place = _longest_first(table, question.tokens, room)
    if place is not None:
        _improve(table, question.tokens, room, place)
    if len(table) <= EXACT_DOCUMENTS and question.ranks <= EXACT_RANKS:
        most = limit_s if place is None else min(limit_s, _longest_s(table, place))
        better = _exhaustive(table, question.tokens, room, sizes, most)
        place = place if better is None else better
    if place is None:
        return None
    groups = tuple(tuple(np.flatnonzero(place == group).tolist()) for group in range(len(sizes)))
    return _longest_s(table, place), groups


def _longest_s(table: FloatArray, place: IntArray) -> float:
    own = table[np.arange(len(table)), place]
    return float(np.bincount(place, own, minlength=table.shape[1]).max())


def _longest_first(table: FloatArray, tokens: IntArray, room: FloatArray) -> IntArray | None:
    """Documents by falling work, each to the group that ends first with it and has room."""
    ends, left = np.zeros(table.shape[1]), room.copy()
    place = np.zeros(len(table), dtype=np.int64)
    for document in np.argsort(-table.min(axis=1), kind="stable").tolist():
        after = np.where(left >= tokens[document], ends + table[document], np.inf)
        group = int(after.argmin())
        if not np.isfinite(after[group]):
            return None
        ends[group], place[document] = after[group], group
        left[group] -= tokens[document]
    return place


def _improve(table: FloatArray, tokens: IntArray, room: FloatArray, place: IntArray) -> None:
    """Moves out of the longest group, and exchanges with another, while the longer of both becomes shorter."""
    every = np.arange(len(table))
    for _ in range(_MOVES):
        ends = np.bincount(place, table[every, place], minlength=len(room))
        left = room - np.bincount(place, tokens, minlength=len(room))
        longest = int(ends.argmax())
        inside, outside = np.flatnonzero(place == longest), np.flatnonzero(place != longest)
        moved = np.maximum(ends + table[inside], (ends[longest] - table[inside, longest])[:, None])
        moved[(tokens[inside][:, None] > left) | (np.arange(len(room)) == longest)] = np.inf
        best, change = float(moved.min()), divmod(int(moved.argmin()), len(room))
        other = place[outside]
        given, taken = table[inside][:, other], table[outside, longest][None, :]
        theirs = ends[other] - table[outside, other] + given
        ours = ends[longest] - table[inside, longest][:, None] + taken
        swapped = np.maximum(theirs, ours)
        grows = tokens[inside][:, None] - tokens[outside][None, :]
        swapped[(grows > left[other]) | (-grows > left[longest])] = np.inf
        if swapped.size and swapped.min() < best:
            row, column = divmod(int(swapped.argmin()), swapped.shape[1])
            best = float(swapped[row, column])
            if best < ends[longest] * (1.0 - _TOLERANCE):
                place[inside[row]], place[outside[column]] = other[column], longest
                continue
            return
        if best >= ends[longest] * (1.0 - _TOLERANCE):
            return
        place[inside[change[0]]] = change[1]


def _exhaustive(
    table: FloatArray, tokens: IntArray, room: FloatArray, sizes: tuple[int, ...], limit_s: float
) -> IntArray | None:
    """An assignment shorter than ``limit_s``, the best there is; None where there is none (depth first, bounded)."""
    order = np.argsort(-table.min(axis=1), kind="stable").tolist()
    rows, lengths = table.tolist(), tokens.tolist()
    place, best = [0] * len(rows), None
    ends, left, limit = [0.0] * len(sizes), room.tolist(), limit_s

    def visit(depth: int) -> None:
        nonlocal best, limit
        if depth == len(order):
            best, limit = list(place), max(ends)
            return
        document, seen = order[depth], set()
        for group in sorted(range(len(sizes)), key=lambda one: ends[one] + rows[document][one]):
            after, alike = ends[group] + rows[document][group], (sizes[group], ends[group], left[group])
            if after >= limit * (1.0 - _TOLERANCE) or left[group] < lengths[document] or alike in seen:
                continue
            seen.add(alike)
            before = ends[group]
            ends[group], place[document] = after, group
            left[group] -= lengths[document]
            visit(depth + 1)
            ends[group] = before
            left[group] += lengths[document]

    visit(0)
    return None if best is None else np.array(best, dtype=np.int64)
