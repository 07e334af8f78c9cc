"""Functions that become machine code at their first call, and stay on disk for later processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite.ir import Constant
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from meshplan.planner.serving.simulation.compiled.stored import SOURCES, drop_outdated

F = TypeVar("F", bound=Callable[..., object])


def machine_code(function: F) -> F:
    """Compile with Numba: without reordered arithmetic, so that every figure is that of the same line in Python.

    An index beyond the end of an array raises, as in Python. Every call is inlined: the arrays of a run are passed as a
    hundred and fifty numbers, which took seven eighths of its time (2026-11-28).
    """
    return cast(F, numba.njit(cache=True, boundscheck=True, fastmath=False, forceinline=True)(function))


@intrinsic
def borrowed(_: object, memory: Any) -> tuple[Any, Callable[..., Any]]:
    """A tuple of arrays (``memory``) as arrays that own nothing, so that passing them on counts no references.

    Numba counts the references to each array of the tuple at every call, atomically, which took two thirds of a run
    (2026-11-28). The caller keeps the arrays alive meanwhile. It stands inside compiled functions only.
    """

    def code(context: Any, builder: Any, _: object, arguments: Any) -> Any:
        found = arguments[0]
        for place, kind in enumerate(memory.types):
            array = make_array(kind)(context, builder, builder.extract_value(found, place))
            # No record of references (``meminfo``), no object of Python that owns the memory (``parent``).
            array.meminfo, array.parent = Constant(array.meminfo.type, None), Constant(array.parent.type, None)
            found = builder.insert_value(found, array._getvalue(), place)
        return found

    return memory(memory), code


drop_outdated(SOURCES)
