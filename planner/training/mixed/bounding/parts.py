"""Parts of the space of a search, the least bound first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.mixed.bounding.bounds import Choice, Field
from meshplan.planner.training.mixed.bounding.decisions import least_of_decisions
from meshplan.planner.training.mixed.bounding.fills import Cells

# Parts that are halved at once.
AT_ONCE = 8
# Decisions of a part are listed where neither τ nor the messages can move its bound by more than this share: few are
# left.
LISTED = 0.006
# A part is as narrow as it gets where they cannot move it by this share; by the finer one where decisions are listed.
NARROW, FINEST = 0.0015, 0.0007
# Messages without an upper end are cut at so many times the lower one.
DOUBLE = 2.0


@dataclass(order=True, slots=True)
class _Part:
    """One part, in the order of its bound.

    Args:
        bound_s: lower bound of every plan in it.
        number: parts with the same bound stand in the order in which they were made.
        cell: one cell.
        decision: that the bound likes best.
    """

    bound_s: float
    number: int
    cell: Cells = field(compare=False)
    decision: tuple[Choice, ...] = field(compare=False)


class Parts:
    """All parts of a search.

    Args:
        fields: the space of each S.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._open: list[list[_Part]] = [[] for _ in fields]
        self._narrow_s, self._beyond_s = float("inf"), float("inf")
        self.count = self._made = 0
        for index, one in enumerate(fields):
            cells, beyond = one.start()
            self._beyond_s = min(self._beyond_s, beyond)
            self._add(index, cells, np.zeros(len(cells)))

    @property
    def open_bound_s(self) -> float:
        """Least bound of a part that can be halved."""
        return min((parts[0].bound_s for parts in self._open if parts), default=float("inf"))

    @property
    def bound_s(self) -> float:
        """Lower bound of every plan."""
        return min(self._narrow_s, self._beyond_s, self.open_bound_s)

    def can_improve(self, ceiling_s: float) -> bool:
        """Whether halving parts may raise the bound, as long as it is below a ceiling."""
        return self.open_bound_s < min(ceiling_s, self._narrow_s)

    def halve_least(self, ceiling_s: float, tied_s: float) -> list[tuple[Choice, ...]]:
        """Halve the part with the least bound, and the next ones of the same S below a ceiling.

        Args:
            ceiling_s: bounds of this or more are of no interest.
            tied_s: narrow parts with a bound below this are bounded by their decisions.

        Returns:
            the decisions that their bounds liked best.
        """
        some = [index for index, parts in enumerate(self._open) if parts]
        index = min(some, key=lambda one: self._open[one][0].bound_s)
        heap, taken = self._open[index], list[_Part]()
        while heap and len(taken) < AT_ONCE and (not taken or heap[0].bound_s < ceiling_s):
            taken.append(heapq.heappop(heap))
        halves, least, liked = list[Cells](), list[float](), list[tuple[Choice, ...]]()
        for part in taken:
            liked.append(part.decision)
            bound_s, decision = self._by_decisions(self._fields[index], part, tied_s)
            liked.append(decision)
            narrow_s = (FINEST if bound_s < tied_s else NARROW) * part.bound_s
            pair = _halves(part.cell, self._fields[index].num_microbatches, narrow_s)
            if pair is None or bound_s >= tied_s > part.bound_s:
                self._narrow_s = min(self._narrow_s, bound_s)
            else:
                halves.append(pair)
                least += [part.bound_s] * 2
        if halves:
            self._add(index, Cells.joined(halves), np.array(least))
        return [decision for decision in liked if decision]

    @staticmethod
    def _by_decisions(field: Field, part: _Part, tied_s: float) -> tuple[float, tuple[Choice, ...]]:
        """Bound of a part by its decisions where few may be left, and the decision that has it."""
        few = part.bound_s < tied_s and _width_s(part.cell, field.num_microbatches) <= LISTED * part.bound_s
        closer = least_of_decisions(field, part.cell, tied_s) if few else None
        if closer is None:
            return part.bound_s, ()
        return max(part.bound_s, closer[0]), closer[1]

    def _add(self, index: int, cells: Cells, least_s: FloatArray) -> None:
        bounds, decisions = self._fields[index].bounds(cells)
        self.count += len(cells)
        for cell, bound in enumerate(np.maximum(bounds, least_s).tolist()):
            self._made += 1
            if np.isfinite(bound):
                heapq.heappush(self._open[index], _Part(bound, self._made, cells.taking(cell), decisions[cell]))


def _width_s(cell: Cells, num_microbatches: int) -> float:
    """How much τ or the messages of one cell move its bound, whichever moves it more."""
    by_tau = num_microbatches * float(cell.end_s[0] - cell.begin_s[0])
    return max(by_tau, float(cell.most_waiting_s[0] - cell.least_waiting_s[0]))


def _halves(cell: Cells, num_microbatches: int, narrow_s: float) -> Cells | None:
    """Two halves of one cell, cut where it leaves more open; None where it is narrow."""
    begin, end = float(cell.begin_s[0]), float(cell.end_s[0])
    low, high = float(cell.least_waiting_s[0]), float(cell.most_waiting_s[0])
    by_tau, by_waiting = num_microbatches * (end - begin), high - low
    if _width_s(cell, num_microbatches) <= narrow_s:
        return None
    if by_tau >= by_waiting:
        middle = np.sqrt(begin * end)
        return Cells.of([begin, middle], [middle, end], [low, low], [high, high])
    middle = low * DOUBLE if np.isinf(high) else (low + high) / 2.0
    return Cells.of([begin, begin], [end, end], [low, middle], [middle, high])
