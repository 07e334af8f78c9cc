"""Tables of logarithms on a grid, shared by the shipped surfaces: interpolated, filled, made monotone, stored.

Between knots values are linear in the logarithms of the coordinates; outside the grid its edge is kept, and the
caller's formula decides how times grow from there. A grid of measurements has holes: only knots that a measurement
touched are stored, the others take the mean of their nearest neighbours when the grid is read.

A stored grid is the bits of its touched knots and their values as 16-bit multiples of a step, low bytes before high
ones, both compressed (LZMA) and written in base 85.
"""

from __future__ import annotations

import base64
import lzma
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
# A dictionary as large as the largest grid; the usual one costs milliseconds to set up.
_FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 9, "dict_size": 1 << 16}]
Mask = NDArray[np.bool_]
Knots = tuple[FloatArray, ...]


def interpolation(knots: Knots, points: Sequence[FloatArray]) -> tuple[NDArray[np.intp], FloatArray]:
    """Flat grid indices and weights of the corners around each point, [2^axes, points] each."""
    indices: list[NDArray[np.intp]] = [np.zeros(len(points[0]), dtype=np.intp)]
    weights: list[FloatArray] = [np.ones(len(points[0]))]
    for positions, values in zip(knots, points, strict=True):
        if len(positions) == 1:
            continue
        index = np.minimum(np.maximum(np.searchsorted(positions, values, side="right") - 1, 0), len(positions) - 2)
        start, end = np.log(positions[index]), np.log(positions[index + 1])
        share = np.minimum(np.maximum((np.log(values) - start) / (end - start), 0.0), 1.0)
        indices = [at * len(positions) + (index + side) for at in indices for side in (0, 1)]
        weights = [weight * part for weight in weights for part in (1.0 - share, share)]
    return np.array(indices), np.array(weights)


def grid_value(knots: Knots, values: FloatArray, points: Sequence[FloatArray]) -> FloatArray:
    """Interpolated values at flat ``points`` (one array per axis), [points]."""
    indices, weights = interpolation(knots, points)
    return np.asarray((values.ravel()[indices] * weights).sum(axis=0))


def neighbour_sum(values: FloatArray) -> FloatArray:
    """Sum over the direct neighbours of each knot, those beyond the edge counted as zero."""
    total = np.zeros_like(values)
    for axis in range(values.ndim):
        lower, upper = [slice(None)] * values.ndim, [slice(None)] * values.ndim
        lower[axis], upper[axis] = slice(None, -1), slice(1, None)
        total[tuple(lower)] += values[tuple(upper)]
        total[tuple(upper)] += values[tuple(lower)]
    return total


def filled(values: FloatArray, known: Mask) -> FloatArray:
    """``values`` where ``known``; elsewhere the mean of the neighbours, spreading outwards from the known knots."""
    values, known = np.where(known, values, 0.0), known.copy()
    while known.any() and not known.all():
        count = neighbour_sum(known.astype(np.int8))
        reached = ~known & (count > 0)
        values[reached] = neighbour_sum(values)[reached] / count[reached]
        known |= reached
    return values


def monotone(values: FloatArray, known: Mask, axes: Sequence[int]) -> FloatArray:
    """``values`` made to rise along ``axes``; the unknown ones give way.

    Known knots that fall (by rounding: a fit has made them rise) are lifted. Unknown ones are then drawn between the
    greatest known value below them and the least above.
    """
    lower = np.where(known, values, -np.inf)
    for axis in axes:
        lower = np.maximum.accumulate(lower, axis=axis)
    upper = np.where(known, lower, np.inf)
    for axis in axes:
        upper = np.flip(np.minimum.accumulate(np.flip(upper, axis=axis), axis=axis), axis=axis)
    result = np.where(known, lower, np.clip(values, lower, upper))
    for axis in axes:
        result = np.maximum.accumulate(result, axis=axis)
    return np.asarray(result)


def packed(values: FloatArray, step: float) -> str:
    """``values``, any shape, as text; each is rounded to a multiple of ``step``."""
    whole = np.round(values.ravel() / step).astype("<i2")
    return _text(whole.view(np.uint8).reshape(-1, 2).T.tobytes())


def unpacked(text: str, step: float) -> FloatArray:
    """The inverse of :func:`packed`, flat."""
    planes = np.frombuffer(_bytes(text), dtype=np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes.T).view("<i2").ravel() * step


def grid_row(values: FloatArray, known: Mask, *, step: float) -> dict[str, Any]:
    """A grid in its stored form."""
    return {"step": step, "known": _text(np.packbits(known).tobytes()), "values": packed(values[known], step)}


def sparse_from_row(row: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[FloatArray, Mask]:
    """The grid of :func:`grid_row`, zero where nothing is known, and the knots that are known."""
    size = int(np.prod(shape))
    bits = np.frombuffer(_bytes(row["known"]), dtype=np.uint8)
    known = np.unpackbits(bits, count=size).astype(bool)
    values = np.zeros(size)
    values[known] = unpacked(row["values"], row["step"])
    return values.reshape(shape), known.reshape(shape)


def grid_from_row(row: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[FloatArray, Mask]:
    """The grid of :func:`grid_row` with its holes filled, and the knots that were known."""
    values, known = sparse_from_row(row, shape)
    return filled(values, known), known


def _text(content: bytes) -> str:
    return base64.b85encode(lzma.compress(content, format=lzma.FORMAT_ALONE, filters=_FILTERS)).decode()


def _bytes(text: str) -> bytes:
    return lzma.decompress(base64.b85decode(text), format=lzma.FORMAT_ALONE)
