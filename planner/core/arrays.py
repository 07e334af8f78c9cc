"""NumPy array types by what they hold. Shapes are documented where the arrays are used."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

# The names say what an array holds. NumPy's own promotion rules (int / int = float) are left to NumPy.
FloatArray = NDArray[Any]
IntArray = NDArray[Any]
BoolArray = NDArray[Any]
