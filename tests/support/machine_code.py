"""The simulation in machine code: compiled once for all workers, loaded where many short runs are simulated.

No run of a test is long enough for a plan to load it by itself, but a suite has thousands; the figures are the same.
As a program, ``python machine_code.py`` compiles. Numba does so at the first call of a function, so that it serves
requests: some by one worker alone, whose next ones follow the last, and some by two.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

MODULE = "meshplan.planner.serving.simulation.compiled.serve"


def compiling() -> subprocess.Popen[bytes] | None:
    """A process that leaves the compiled code where others find it (30 s the first time); None without Numba."""
    return subprocess.Popen([sys.executable, __file__]) if find_spec("numba") else None


def load() -> None:
    if find_spec("numba"):
        import_module(MODULE)


def serve() -> None:
    """Simulate enough requests to be worth machine code once it is loaded."""
    from simulation_cases import linear_cost, random_requests

    from meshplan.planner.serving.problem.config import EngineLimits, Router
    from meshplan.planner.serving.simulation.cluster import ServingSystem, SimulatedPool, simulate_system
    from meshplan.planner.serving.simulation.compiled.choice import LEAST_LOADED

    limits = EngineLimits(max_num_seqs=64, max_batched_tokens=4096)
    for num_workers, concurrency in ((1, 8), (2, None)):
        pool = SimulatedPool(cost=linear_cost(), limits=limits, kv_capacity_tokens=100_000, num_workers=num_workers)
        router = Router.ROUND_ROBIN if num_workers > 1 else None
        requests = random_requests(0, LEAST_LOADED, concurrency=concurrency)
        simulate_system(requests, ServingSystem(pools=(pool,), router=router, kv_block_tokens=16))


if __name__ == "__main__":
    load()
    serve()
