"""Times that a surface has told before.

A search for a deployment prices the same kernels again and again: workers of one layout differ in their role, or in the
limits of their scheduler, and attention in one of these at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshplan.catalogs.surfaces.grid import FloatArray

# Answers that a surface keeps, some kilobytes each: a search for 70B on eight devices asks it for some 200.
MOST_KNOWN = 1024


class KnownTimes:
    """Seconds by the sizes that were asked for; the arrays are read-only, as several callers have them."""

    def __init__(self) -> None:
        self._times: dict[tuple[object, ...], FloatArray] = {}

    def of(self, price: Callable[..., FloatArray], **sizes: Any) -> FloatArray:
        """``price(**sizes)``, from before where it is known."""
        key = tuple(_written(size) for size in sizes.values())
        known = self._times.get(key)
        if known is None:
            if len(self._times) >= MOST_KNOWN:
                self._times.clear()
            known = self._times[key] = price(**sizes)
            known.setflags(write=False)
        return known


def _written(size: Any) -> object:
    if isinstance(size, str):
        return size
    array = np.asarray(size, dtype=float)
    return array.shape, array.tobytes()
