"""Decisions on nodes that come and go: the policy, Parcae's two ways and hindsight, on recorded availability.

    python tests/benchmarks/availability.py TRACE.csv.gz… [--restart S…] [--draws N]

Each trace is played with the throughputs that Parcae measured by number of nodes (GPT of 1.5 B parameters) stretched
to the largest number of nodes in the trace, at each restart time. A row: progress against the best in hindsight
(regret), of

    policy     meshplan's
    reactive   Parcae's throughput-optimized way: use every node as soon as it is there
    liveput    Parcae's own: ARIMA(1, 1, 0) of the last 12 minutes, the best plan for the next 10, each minute
    simulated  the policy again, event by event with single nodes that come and go (mean of N draws)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from availability_cases import PARCAE_RATES, PARCAE_RESTART_S, Liveput, Reactive, stretched
from availability_events import simulated_progress

from meshplan.planner.goodput.availability.capacity import Capacity
from meshplan.planner.goodput.availability.hindsight import best_in_hindsight
from meshplan.planner.goodput.availability.outcome import play
from meshplan.planner.goodput.availability.policy import LearnedPolicy
from meshplan.planner.goodput.availability.trace import read_availability


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--restart", type=float, nargs="+", default=[PARCAE_RESTART_S, 300.0])
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--each", action="store_true", help="a line for every trace")
    asked = parser.parse_args()
    pooled: dict[str, list[float]] = {name: [] for name in ("policy", "reactive", "liveput", "simulated")}
    print(f"{'trace':44} {'C':>5} {'days':>5} {'policy':>8} {'reactive':>8} {'liveput':>8} {'simulated':>9}")
    for path in asked.files:
        for restart in asked.restart:
            rows = []
            for trace in read_availability(path):
                most = int(trace.nodes.max())
                if most == 0:
                    continue
                capacity = Capacity(rates=stretched(PARCAE_RATES, most), change_s=restart, forced_s=restart)
                best = best_in_hindsight(trace, capacity)
                policy = play(trace, capacity, LearnedPolicy(capacity)).progress
                played = [policy, *(play(trace, capacity, one(capacity)).progress for one in (Reactive, Liveput))]
                drawn = simulated_progress(trace, capacity, lambda c=capacity: LearnedPolicy(c), draws=asked.draws)
                row = [1.0 - one / best for one in played] + [abs(policy / drawn - 1.0) if drawn else 0.0]
                rows.append(row)
                if asked.each:
                    show(f"  {trace.name}", restart, trace.length_s / 86_400, row)
                for name, value in zip(pooled, row, strict=True):
                    pooled[name].append(value)
            show(path.name.removesuffix(".csv.gz"), restart, len(rows), list(np.mean(rows, axis=0)))
    print(
        ", ".join(
            f"{name}: mean {statistics.mean(values):.2%}, largest {max(values):.2%}" for name, values in pooled.items()
        )
    )


def show(name: str, restart: float, count: float, row: list[float]) -> None:
    print(f"{name:44} {restart:5.0f} {count:5.1f} " + " ".join(f"{value:8.2%}" for value in row), flush=True)


if __name__ == "__main__":
    main()
