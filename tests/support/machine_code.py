"""The simulation in machine code: compiled once for all workers, loaded where many short runs are simulated.

No run of a test is long enough for a plan to load it by itself, but a suite has thousands; the figures are the same.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

MODULE = "meshplan.planner.serving.simulation.compiled.serve"


def compiling() -> subprocess.Popen[bytes] | None:
    """A process that leaves the compiled code where others find it (30 s the first time); None without Numba."""
    return subprocess.Popen([sys.executable, "-c", f"import {MODULE}"]) if find_spec("numba") else None


def load() -> None:
    if find_spec("numba"):
        import_module(MODULE)
