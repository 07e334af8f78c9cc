"""Functions that become machine code at their first call, and stay on disk for later processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite.ir import Constant
from numba.extending import intrinsic
from numba.np import arrayobj

from meshplan.planner.serving.simulation.compiled.stored import SOURCES, drop_outdated

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")
array_of: Callable[[Any], Callable[[Any, Any, Any], Any]] = arrayobj.make_array


def machine_code(function: F) -> F:
    """Compile with Numba: without reordered arithmetic, so that every figure is that of the same line in Python.

    An index beyond the end of an array raises, as in Python. Every call is inlined: the arrays of a run are passed as a
    hundred and fifty numbers, which took seven eighths of its time (2026-11-28).
    """
    return cast(F, numba.njit(cache=True, boundscheck=True, fastmath=False, forceinline=True)(function))


def _borrowed(_: object, memory: Any) -> tuple[Any, Callable[..., Any]]:
    """What Numba asks of an intrinsic: its types, and how its code is made."""

    def code(context: Any, builder: Any, _: object, arguments: Any) -> Any:
        found = arguments[0]
        for place, kind in enumerate(memory.types):
            array = array_of(kind)(context, builder, builder.extract_value(found, place))
            # No record of references (``meminfo``), no object of Python that owns the memory (``parent``).
            array.meminfo, array.parent = Constant(array.meminfo.type, None), Constant(array.parent.type, None)
            found = builder.insert_value(found, array._getvalue(), place)
        return found

    return memory(memory), code


# A tuple of arrays as arrays that own nothing, so that passing them on counts no references: Numba counts those of each
# array at every call, atomically, which took two thirds of a run (2026-11-28). The caller keeps the arrays alive
# meanwhile. It stands inside compiled functions only.
borrowed = cast(Callable[[T], T], intrinsic(_borrowed))


drop_outdated(SOURCES)
