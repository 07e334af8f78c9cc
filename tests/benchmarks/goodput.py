"""The share of a run that trains: against a simulation event by event, and against published points.

    python tests/benchmarks/goodput.py [SETTINGS] [--points GOODPUT.json]

``--points`` names a file of published results (id, quantity, given, value, compare). Nothing is fitted to a point that
judges: rates come with the point or, for mean times to failure, from the row of one-node jobs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from run_cases import drawn, simulated_ratio

from meshplan.planner.goodput.checkpoints import best_interval, daly_interval, efficiency
from meshplan.planner.goodput.conditions import Checkpoints, Interruptions
from meshplan.planner.goodput.published import RESTART_S, counted_rate
from meshplan.planner.goodput.spares import waiting_share

INTERRUPTIONS = 100_000
# A step of the large jobs whose reports state none, where checkpoints are taken every step.
EVERY_STEP_S = 10.0
DAY = 86_400.0


def against_simulation(count: int) -> None:
    errors, losses, daly = [], [], []
    for seed in range(1000, 1000 + count):
        stops, costs, interval = drawn(seed)
        predicted = float(efficiency(interval, stops, costs)) * (1.0 - waiting_share(stops))
        measured = simulated_ratio(stops, costs, interval, seed=seed, many=INTERRUPTIONS)
        errors.append(abs(predicted / measured - 1.0))
        best = best_interval(stops, costs)
        least = max(1.0, costs.durable_s - costs.block_s)
        every = [least * (20.0 / stops.per_s / least) ** (place / 20_000) for place in range(20_001)]
        exhaustive = float(efficiency(every, stops, costs).max())
        losses.append(1.0 - best.efficiency / exhaustive)
        short = max(least, daly_interval(stops, costs))
        daly.append(1.0 - float(efficiency(short, stops, costs)) / exhaustive)
    errors.sort()
    print(f"{count} random settings: ratio against {INTERRUPTIONS:,} simulated interruptions each:")
    print(f"  median {errors[count // 2]:.2%}, largest {errors[-1]:.2%}, above 2 %: {sum(e > 0.02 for e in errors)}")
    print(f"  loss by the interval: at most {max(losses):.4%}; by Daly's formula {max(daly):.1%}")


def ratio_of(given: dict[str, Any]) -> float | None:
    """The ratio of a published job from what its row says; restarts take the default where it says nothing."""
    nodes = given.get("num_devices", given.get("num_devices_max", 0)) / given.get("devices_per_node", 8)
    if "failures_per_node_day" in given:
        per_s = given["failures_per_node_day"] * nodes / DAY
    elif "incidents" in given:
        per_s = given["incidents"] / given["window_s"]
    elif "mean_time_between_failures_s" in given:
        per_s = 1.0 / given["mean_time_between_failures_s"]
    else:
        return None
    restart = given.get("restart_s", given.get("stall_s", RESTART_S))
    interval = given.get("checkpoint_interval_s", 0.0 if "stall_s" in given else EVERY_STEP_S)
    stops = Interruptions(per_s=per_s, restart_s=restart)
    return float(efficiency(max(interval, 1e-3), stops, Checkpoints(block_s=given.get("checkpoint_block_s", 0.0))))


def against_points(path: Path) -> None:
    print(f"{'point':34} {'published':>12} {'predicted':>12}")
    for point in json.loads(path.read_text())["points"]:
        given, published = point["given"], point["value"]
        if point["quantity"] == "ettr":
            predicted = ratio_of(given)
        elif point["quantity"] == "mttf_s":
            nodes = given["num_devices"] / given["devices_per_node"]
            stated = given.get("failures_per_node_day")
            rate = counted_rate("rsc-1-all-causes").per_node_day if stated is None else stated
            predicted = DAY / (rate * nodes)
        else:
            continue
        sign = {"equal": "", "at_least": "≥ ", "at_most": "≤ "}[point["compare"]]
        text = "not said" if predicted is None else f"{predicted:.4g}"
        print(f"{point['id']:34} {sign + format(published, '.4g'):>12} {text:>12}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=int, nargs="?", default=200)
    parser.add_argument("--points", type=Path)
    asked = parser.parse_args()
    against_simulation(asked.settings)
    if asked.points is not None:
        against_points(asked.points)


if __name__ == "__main__":
    main()
