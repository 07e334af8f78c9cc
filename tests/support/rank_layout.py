"""Where a rank stands in a framework's order of parallel dimensions."""

from __future__ import annotations

from collections.abc import Sequence


def rank_coordinates(order: Sequence[str], sizes: Sequence[int], rank: int) -> dict[str, int]:
    """Position of ``rank`` in each dimension of ``order`` (fastest-varying first).

    >>> rank_coordinates(("tensor", "data"), (4, 2), 6)
    {'tensor': 2, 'data': 1}
    """
    coordinates = {}
    for dimension, size in zip(order, sizes, strict=True):
        rank, coordinates[dimension] = divmod(rank, size)
    return coordinates
