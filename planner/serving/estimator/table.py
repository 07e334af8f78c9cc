"""Seconds as a function of a whole number: priced at a few knots, interpolated between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import overload

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

# Entries kept as a list: decode batches, which simulations read most. Larger arguments are interpolated on reading.
LISTED = 1024


class Table(Sequence[float]):
    """Seconds for 0 (nothing: 0), 1, … most, linear between the knots.

    Args:
        knots: rising whole numbers from 1 to most.
        seconds: at the knots; made non-decreasing.
        most: last argument.
    """

    __slots__ = ("_head", "_knots", "_line", "_most", "_seconds")

    def __init__(self, knots: FloatArray, seconds: FloatArray, most: int) -> None:
        rising = np.maximum.accumulate(seconds)
        values = np.interp(np.arange(min(most, LISTED) + 1, dtype=np.float64), knots, rising)
        values[0] = 0.0
        self._head: list[float] = values.tolist()
        self._knots: list[float] = knots.tolist()
        self._seconds: list[float] = rising.tolist()
        self._line = np.array(self._knots), np.array(self._seconds)
        self._most = most

    def __len__(self) -> int:
        return self._most + 1

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> list[float]: ...

    def __getitem__(self, index: int | slice) -> float | list[float]:
        if index.__class__ is int and -1 < index < len(self._head):  # most of what a simulation reads
            return self._head[index]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index <= self._most:
            raise IndexError(index)
        if index < len(self._head):
            return self._head[index]
        knots, seconds = self._knots, self._seconds
        above = bisect_right(knots, index)
        if above == len(knots):
            return seconds[-1]
        share = (index - knots[above - 1]) / (knots[above] - knots[above - 1])
        return seconds[above - 1] + share * (seconds[above] - seconds[above - 1])

    def at(self, index: IntArray) -> FloatArray:
        """Entries at many arguments, those beyond the last as there."""
        found = np.interp(index, *self._line)
        return np.asarray(np.where(index > 0, found, 0.0))

    def whole(self) -> FloatArray:
        """[most + 1] every entry, each to the bit what reading it gives."""
        found = np.empty(self._most + 1)
        found[: len(self._head)] = self._head
        index = np.arange(len(self._head), self._most + 1, dtype=np.float64)
        if len(index):
            knots, seconds = self._line
            above = np.searchsorted(knots, index, side="right")
            inside = np.minimum(above, len(knots) - 1)
            share = (index - knots[inside - 1]) / (knots[inside] - knots[inside - 1])
            between = seconds[inside - 1] + share * (seconds[inside] - seconds[inside - 1])
            found[len(self._head) :] = np.where(above == len(knots), seconds[-1], between)
        return found


def token_knots(most: int) -> FloatArray:
    """Token counts at which tables are priced: whole numbers, eight per doubling, up to ``most``."""
    octaves = np.arange(0.0, np.log2(max(most, 2)) + 0.125, 0.125)
    return np.unique(np.minimum(np.round(2.0**octaves), most)).astype(np.float64)
