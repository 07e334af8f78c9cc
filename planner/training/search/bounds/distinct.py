"""Distinct values of columns of small whole numbers: counted instead of sorted.

Degrees, micro-batches and stages of a million templates take a few dozen values each. A table of one place for every
possible value tells which occur in two passes over the column; sorting it, as ``numpy.unique`` does for positions,
takes log n of them.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import IntArray

# Places of the table for each number of the column: beyond, its own passes take as long as sorting.
MOST_PLACES = 8
# Columns below this length are sorted: a few calls take as long.
LEAST_COUNTED = 256
# Numbers that Python puts in order sooner than NumPy begins to.
MOST_IN_PYTHON = 64


def distinct(column: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct values, ascending [k], and which of them each number is [n]: ``numpy.unique`` with ``return_inverse``.

    >>> distinct(np.array([8, 2, 8, 1]))
    (array([1, 2, 8]), array([2, 1, 2, 0]))
    """
    num = len(column)
    if num < LEAST_COUNTED or column.dtype.kind not in "biu" or column.min() < 0:
        return _sorted(column)
    numbers = column.astype(np.uint8) if column.dtype == bool else column
    most = int(numbers.max())
    if most >= MOST_PLACES * num:
        return _sorted(column)
    occurs = np.zeros(most + 1, dtype=bool)
    occurs[numbers] = True
    values = np.flatnonzero(occurs)
    place = np.zeros(most + 1, dtype=np.int64)
    place[values] = np.arange(len(values))
    return values.astype(column.dtype), place[numbers]


def occurring(numbers: IntArray, num: int) -> IntArray:
    """Which of the numbers from 0 to ``num`` occur, ascending.

    >>> occurring(np.array([2, 0, 2]), 4)
    array([0, 2])
    """
    occurs = np.zeros(num, dtype=bool)
    occurs[numbers] = True
    return np.flatnonzero(occurs)


def firsts(which: IntArray, num_values: int) -> IntArray:
    """Where each value occurs first, [k], by the second result of :func:`distinct`.

    >>> firsts(np.array([2, 1, 2, 0]), 3)
    array([3, 1, 0])
    """
    first = np.zeros(num_values, dtype=np.int64)
    first[which[::-1]] = np.arange(len(which))[::-1]  # of several numbers in one place the last stays
    return first


def _sorted(column: IntArray) -> tuple[IntArray, IntArray]:
    if len(column) > MOST_IN_PYTHON:
        values, which = np.unique(column, return_inverse=True)
        return values, which
    numbers = column.tolist()
    ascending = sorted(set(numbers))
    place = {number: index for index, number in enumerate(ascending)}
    return np.array(ascending, dtype=column.dtype), np.array([place[number] for number in numbers], dtype=np.int64)
