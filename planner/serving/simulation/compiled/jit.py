"""Functions that become machine code at their first call, and stay on disk for later processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def machine_code(function: F) -> F:
    """Compile with Numba: without reordered arithmetic, so that every figure is that of the same line in Python.

    An index beyond the end of an array raises, as in Python.
    """
    return cast(F, numba.njit(cache=True, boundscheck=True, fastmath=False)(function))
