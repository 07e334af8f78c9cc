"""Which runs are simulated in machine code, where Numba is installed: long ones, and those that follow many others.

The figures are the same to the bit, so only the time depends on it. A process that simulates many short runs in Python
loads Numba once they have taken about as long as that takes: it then loses at most as much again, however few follow.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

from meshplan.planner.core.arrays import BoolArray
from meshplan.planner.serving.problem.config import Router
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.simulation.compiled.member import Handover, Member
from meshplan.planner.serving.simulation.compiled.stored import SOURCES, is_stored
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping
from meshplan.planner.serving.simulation.run import ServingRun

# Requests of a run for which Numba is loaded, and of one that is worth it once it is. Of processor time a request takes
# 60 µs in Python; loading Numba and its stored code 0.7 s, compiling 31 s, once a machine and release (2026-11-24).
# Arrays for a run take as long as some 64 requests in Python (measured runs of 1 to 16,384, 2026-11-26).
LEAST_TO_LOAD, LEAST_LOADED = 50_000, 64
# The same for many runs together, which may be the first on a machine: a minute in Python. And where compiled code is
# there: 0.5 s in Python, at the 40 µs of a request that searches over two nodes need (2026-11-28).
LEAST_TOGETHER, LEAST_STORED = 1_000_000, 12_000
# Most requests times workers: each has four queues of all of them, of which only what is used takes memory.
MOST_QUEUED = 2**26
_ENTRY = "meshplan.planner.serving.simulation.compiled.serve"


@dataclass(slots=True)
class _Runs:
    """Requests of the runs of this process that machine code would have known."""

    num_requests: int = 0


_RUNS = _Runs()


def pays(requests: Requests, num_workers: int) -> bool:
    """Whether a run, or what ran before it, is long enough for machine code, and such as it knows: no prefixes."""
    is_known = requests.prefix is None and requests.blocks is None and len(requests) * num_workers <= MOST_QUEUED
    if not is_known or not _is_here():
        return False
    if _ENTRY in sys.modules:
        return len(requests) >= LEAST_LOADED
    _RUNS.num_requests += len(requests)
    return len(requests) >= LEAST_TO_LOAD or _RUNS.num_requests >= (LEAST_STORED if _is_stored() else LEAST_TOGETHER)


def expect(num_requests: int) -> None:
    """Have Numba ready, where it is installed, if many runs are to come, each of them too short to load it for.

    Args:
        num_requests: of all runs.
    """
    if num_requests >= LEAST_TOGETHER and _is_here():
        with suppress(ImportError, OSError, RuntimeError):  # as in serve_compiled
            import_module(_ENTRY)


def serve_compiled(
    requests: Requests,
    members: Sequence[Member],
    served: BoolArray,
    *,
    kv_block_tokens: int,
    router: Router | None,
    stopping: EarlyStopping | None,
    handover: Handover | None = None,
) -> ServingRun | None:
    """As :func:`~meshplan.planner.serving.simulation.compiled.serve.serve`; None: to be simulated in Python."""
    if not pays(requests, len(members)):
        return None
    try:
        from meshplan.planner.serving.simulation.compiled.serve import serve  # optional
    except (ImportError, OSError, RuntimeError):  # installed, but not for this system; or nowhere to keep its code
        return None
    return serve(
        requests,
        members,
        served,
        kv_block_tokens=kv_block_tokens,
        router=router,
        stopping=stopping,
        handover=handover,
    )


@lru_cache(maxsize=1)
def _is_here() -> bool:
    return find_spec("numba") is not None


@lru_cache(maxsize=1)
def _is_stored() -> bool:
    return is_stored(SOURCES)
